"""The search for what fits a device: a job under each lever alone, and all levers by
memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ebbtide.features.advise.changes import share_host
from ebbtide.features.dryrun.gpu import FakedGpu, capability_of
from ebbtide.features.dryrun.memory.caching_allocator import context_bytes
from ebbtide.features.fit.levers import LEVERS, ON_ONE_RANK, SHARDING, MemoryLever
from ebbtide.features.fit.memory import MemoryModel, MemoryParts
from ebbtide.features.fit.shape import ModelShape
from ebbtide.features.fit.times import iteration_s
from ebbtide.machines.machine import Machine
from ebbtide.model_job import ModelJob

# What torch's allocator keeps beyond the tensors of these jobs, as a share of them,
# where memory is short and cached segments are given back.
ALLOCATOR_SHARE = 0.05
_HOPPER = 9
_MOST_BATCH, _SEQUENCE_STEP = 4096, 256
_MOST_SEQUENCE = 1 << 20


@dataclass(frozen=True)
class RankDevice:
    """A rank's GPU and its share of the host."""

    machine: Machine  # With the rates of a rank, without the system's host memory.
    capacity_bytes: float

    @cached_property
    def gpu(self) -> FakedGpu:
        """The GPU as a dry run has it."""
        name = (self.machine.gpu and self.machine.gpu.name) or self.machine.name
        capability = capability_of(name, self.machine.gpu)
        return FakedGpu(name, capability)

    @cached_property
    def limit_bytes(self) -> float:
        """Memory beside the CUDA context."""
        return self.capacity_bytes - context_bytes(self.gpu.multiprocessors.count)

    @property
    def is_hopper(self) -> bool:
        """Whether products have the larger workspaces."""
        return self.gpu.capability[0] >= _HOPPER


@dataclass(frozen=True)
class FitPoint:
    """A job with some levers, on a device."""

    device: RankDevice
    model: MemoryModel
    levers: tuple[str, ...]

    @property
    def job(self) -> ModelJob:
        """The job."""
        return self.model.job

    @cached_property
    def memory(self) -> MemoryParts:
        """Its device memory at the peak."""
        return self.model.peak()

    @cached_property
    def host_bytes(self) -> float:
        """Host memory of a rank at its peak, while it loads or trains."""
        return self.model.host_bytes()

    @property
    def needed_bytes(self) -> float:
        """Device memory with what the allocator keeps."""
        return (1 + ALLOCATOR_SHARE) * self.memory.total

    @property
    def lacks(self) -> str | None:
        """The memory that is too small for it, `device` or `host`; None: it fits."""
        if self.needed_bytes > self.device.limit_bytes:
            return "device"
        limit = self.device.machine.host_memory_bytes
        is_short = limit is not None and self.host_bytes > limit
        return "host" if is_short else None

    @cached_property
    def iteration_s(self) -> float:
        """The likely time of an iteration, s."""
        return iteration_s(self.model, self.device.machine)

    @property
    def text(self) -> str:
        """Its levers in words."""
        names = []
        for name in self.levers:
            if name == "micro-batch":
                name = f"micro-batch {self.job.batch}"
            elif name == SHARDING.name:
                name = f"{self.job.ranks} ranks"
            names.append(name)
        return " + ".join(names) or "as it is"

    def as_json(self) -> dict[str, Any]:
        """Return the object of `ebbtide plan --frontier --json`."""
        memory, job = self.memory, self.job
        return {
            "levers": list(self.levers),
            "method": job.method,
            "options": options_of(job),
            "device_bytes": round(memory.total),
            "needed_bytes": round(self.needed_bytes),
            "host_bytes": round(self.host_bytes),
            "peak_at": memory.moment,
            "parts": {name: round(size) for name, size in memory.parts.items()},
            "fits": self.lacks is None,
            "iteration_ms": self.iteration_s * 1e3,
        }


@dataclass(frozen=True)
class LeverEffect:
    """A lever alone: the least change that fits, else the greatest."""

    lever: str
    cost: str
    point: FitPoint
    largest_batch: int  # 0: not one sample fits.
    longest_sequence: int  # 0: not the shortest one fits.

    def as_json(self) -> dict[str, Any]:
        """Return the object of `ebbtide plan --frontier --json`."""
        return {
            "lever": self.lever,
            "cost": self.cost,
            **self.point.as_json(),
            "largest_batch": self.largest_batch,
            "longest_sequence": self.longest_sequence,
        }


@dataclass(frozen=True)
class FitSearch:
    """Searches for the jobs that fit a device."""

    job: ModelJob
    shape: ModelShape
    machine: Machine
    capacity_bytes: float  # Memory of the GPU.

    @cached_property
    def _devices(self) -> dict[int, RankDevice]:
        return {}

    def device(self, ranks: int) -> RankDevice:
        """Return the GPU of a rank, of so many ranks."""
        if ranks not in self._devices:
            shared = share_host(self.machine, ranks)
            self._devices[ranks] = RankDevice(shared, self.capacity_bytes)
        return self._devices[ranks]

    def point(self, job: ModelJob, levers: Iterable[str] = ()) -> FitPoint:
        """Return a job with levers on the device."""
        device = self.device(job.ranks)
        model = MemoryModel(job, self.shape, device.is_hopper)
        return FitPoint(device, model, tuple(levers))

    @cached_property
    def own(self) -> FitPoint:
        """The job as it is."""
        return self.point(self.job)

    def effects(self) -> list[LeverEffect]:
        """Return the job as it is, and each lever alone."""
        rows = [self._effect("as it is", "", self.own)]
        for lever in LEVERS:
            points = [self.point(job, [lever.name]) for job in lever.apply(self.job)]
            fitting = [point for point in points if point.lacks is None]
            if points:
                chosen = (fitting or points[-1:])[0]
                rows.append(self._effect(lever.name, lever.cost, chosen))
        return rows

    def _effect(self, name: str, cost: str, point: FitPoint) -> LeverEffect:
        job = point.job
        longest = min(self.shape.longest or _MOST_SEQUENCE, _MOST_SEQUENCE)
        return LeverEffect(
            lever=name,
            cost=cost,
            point=point,
            largest_batch=self._largest(
                lambda size: replace(job, batch=size, micro_steps=1), _MOST_BATCH
            ),
            longest_sequence=_SEQUENCE_STEP
            * self._largest(
                lambda steps: replace(job, sequence=steps * _SEQUENCE_STEP),
                longest // _SEQUENCE_STEP,
            ),
        )

    def _largest(self, make: Callable[[int], ModelJob], most: int) -> int:
        """Return the largest size up to `most` with which a job fits; 0: none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.point(make(middle)).lacks is None:
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def points(self) -> list[FitPoint]:
        """The job under all combinations of levers but more GPUs."""
        return [*self._combined(self.job, ON_ONE_RANK, ())]

    def _combined(
        self, job: ModelJob, levers: Sequence[MemoryLever], names: tuple[str, ...]
    ) -> Iterator[FitPoint]:
        if not levers:
            yield self.point(job, names)
            return
        first, *others = levers
        yield from self._combined(job, others, names)
        for changed in first.apply(job):
            yield from self._combined(changed, others, (*names, first.name))

    @cached_property
    def line(self) -> list[FitPoint]:
        """The combinations that train what the job trains of which none is both smaller
        and faster, the fastest first."""
        return pareto([one for one in self.points if one.job.method == self.job.method])

    @cached_property
    def answer(self) -> FitPoint | None:
        """The fastest combination that fits: what is trained changes last, before
        the number of GPUs; None: none does."""
        methods = [self.job.method, "lora", "qlora"]
        for method in dict.fromkeys(methods):
            own = [point for point in self.points if point.job.method == method]
            fitting = [point for point in pareto(own) if point.lacks is None]
            if fitting:
                return fitting[0]
        return self._with_ranks

    @cached_property
    def _with_ranks(self) -> FitPoint | None:
        for sharded in SHARDING.apply(self.job):
            points = self._combined(sharded, ON_ONE_RANK, (SHARDING.name,))
            fitting = [point for point in points if point.lacks is None]
            if fitting:
                return min(fitting, key=_by_time)
        return None

    @cached_property
    def nearest(self) -> FitPoint:
        """The combination that needs the least device memory."""
        return min(self.points, key=lambda point: point.needed_bytes)


def _by_time(point: FitPoint) -> tuple[float, float, int]:
    return point.iteration_s, point.memory.total, len(point.levers)


def pareto(points: Iterable[FitPoint]) -> list[FitPoint]:
    """Return the points of which none is both smaller and faster, the fastest first."""
    line: list[FitPoint] = []
    for point in sorted(points, key=_by_time):
        if not line or point.memory.total < line[-1].memory.total:
            line.append(point)
    return line


def options_of(job: ModelJob) -> str:
    """Return the options of `ebbtide dry-run --model` that describe a job."""
    default = ModelJob(job.model)
    valued = (
        ("method", job.method),
        ("optimizer", job.optimizer),
        ("precision", job.precision),
        ("loss", job.loss),
        ("micro_steps", job.micro_steps),
    )
    words = [f"--model {job.model}", f"--batch {job.batch}"]
    words.append(f"--sequence {job.sequence}")
    for name, value in valued:
        if value != getattr(default, name):
            words.append(f"--{name.replace('_', '-')} {value}")
    flags = (
        ("checkpointing", job.checkpointing),
        ("offload-activations", job.offloads_activations),
        ("offload-optimizer", job.offloads_optimizer),
    )
    words += [f"--{name}" for name, is_set in flags if is_set]
    if job.ranks > 1:
        words += [f"--ranks {job.ranks}", f"--strategy {job.strategy}"]
    return " ".join(words)
