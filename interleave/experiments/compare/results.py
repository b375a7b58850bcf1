"""Results of a comparison: measured figures and their predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ebbtide.interleave.experiments.compare.job import Shape
from ebbtide.interleave.experiments.compare.testbed import Testbed
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.phases import PHASES


@dataclass(frozen=True)
class Pair:
    """A measured figure and its prediction."""

    measured: float
    predicted: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if the prediction is 0."""
        return self.measured / self.predicted if self.predicted > 0 else None

    def as_json(self) -> dict[str, float | None]:
        return {"measured": self.measured, "predicted": self.predicted, "ratio": self.ratio}


@dataclass(frozen=True)
class ComparedBytes:
    """Bytes that the engine has counted, and those of the plan.

    Attributes:
        device: Device memory of state and its buffers.
        host: Host memory of state, its buffers and those of copies.
        storage_read: Bytes read from storage in an iteration.
        storage_written: Bytes written to storage in an iteration.
    """

    device: Pair
    host: Pair
    storage_read: Pair
    storage_written: Pair

    @property
    def storage(self) -> Pair:
        """Bytes read from and written to storage in an iteration."""
        read, written = self.storage_read, self.storage_written
        return Pair(read.measured + written.measured, read.predicted + written.predicted)

    def as_json(self) -> dict[str, Any]:
        names = ("device", "host", "storage_read", "storage_written")
        return {f"{name}_bytes": getattr(self, name).as_json() for name in names}


@dataclass(frozen=True)
class ComparedPolicy:
    """The measured and predicted figures of one policy.

    Attributes:
        policy: Text of the policy.
        counted: Number of iterations that medians are over.
        times: Median in ms of the iteration, of each phase, and of what the optimizer adds to the iteration: `exposed`.
        busy: Busy share of each resource during the update.
        peak_device_bytes: Peak of the device memory of the plan, at the measured or predicted times of its operations.
        memory: Device memory and host memory that the optimizer holds, and bytes read from and written to storage in an
            iteration, as the engine has counted them and as the plan needs them: see `ComparedBytes`.
        losses: Loss of every iteration; None for one that is not finite.
        losses_equal: Whether all losses equal those of the first policy, bit for bit.
        measured: Schedule of the iteration with the median update time.
        predicted: Simulated schedule of the same plan.
    """

    policy: str
    counted: int
    times: dict[str, Pair]
    busy: dict[str, Pair]
    peak_device_bytes: Pair
    memory: ComparedBytes
    losses: list[float | None]
    losses_equal: bool
    measured: Schedule
    predicted: Schedule

    @property
    def is_exact(self) -> bool:
        """Whether the plan is exact, and the losses show it."""
        return self.losses_equal and self.measured.plan.is_exact

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "counted": self.counted,
            **{f"{phase}_ms": pair.as_json() for phase, pair in self.times.items()},
            "busy": {resource: pair.as_json() for resource, pair in self.busy.items()},
            "peak_device_bytes": self.peak_device_bytes.as_json(),
            **self.memory.as_json(),
            "stored_subgroups": len(self.measured.plan.stored),
            "exact": self.is_exact,
            "final_loss": self.losses[-1],
            "losses_equal": self.losses_equal,
            "losses": self.losses,
        }


@dataclass(frozen=True)
class BaselineResult:
    """The measured medians in ms of another optimizer."""

    name: str
    about: str
    iteration_ms: float
    forward_ms: float
    backward_ms: float
    update_ms: float
    final_loss: float | None
    losses: list[float | None]


@dataclass(frozen=True)
class Comparison:
    """The results of all policies and baselines.

    Attributes:
        testbed: The device and machine that all runs had.
        shape: Shape of the model.
        subgroup_params: Parameters per subgroup.
        iterations: Iterations of each run.
        warmup_iterations: Iterations at the start of each run that are left out of medians.
        results: One entry per policy that ran.
        baselines: One entry per other optimizer that ran.
        skipped: Policies and baselines that cannot run here, with the reason.
    """

    testbed: Testbed
    shape: Shape
    subgroup_params: int
    iterations: int
    warmup_iterations: int
    results: list[ComparedPolicy]
    baselines: list[BaselineResult]
    skipped: dict[str, str]

    @property
    def losses_equal(self) -> bool:
        return all(result.losses_equal for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide compare --json` prints."""
        testbed = self.testbed
        return {
            "device": {"name": testbed.name, "emulated": testbed.emulated, "memory_budget": testbed.memory_budget},
            "job": {"params": self.shape.params, **asdict(self.shape), "subgroup_params": self.subgroup_params},
            "machine": testbed.machine.as_json(),
            "iterations": self.iterations,
            "warmup_iterations": self.warmup_iterations,
            "losses_equal": self.losses_equal,
            "results": [result.as_json() for result in self.results],
            "peers": [asdict(baseline) for baseline in self.baselines],
            "skipped": self.skipped,
        }


def phase_times(measured: Sequence[Schedule], predicted: Schedule) -> dict[str, Pair]:
    """Return the median time in ms of the `iteration`, of each phase, and the `exposed` time."""
    return {
        phase: Pair(
            1e3 * median(getattr(schedule, f"{phase}_s") for schedule in measured),
            1e3 * getattr(predicted, f"{phase}_s"),
        )
        for phase in ("iteration", *PHASES, "exposed")
    }


def busy_shares(measured: Sequence[Schedule], predicted: Schedule) -> dict[str, Pair]:
    """Return the median busy share of each resource during the update."""
    shares, expected = [schedule.busy_shares() for schedule in measured], predicted.busy_shares()
    return {resource: Pair(median(share[resource] for share in shares), expected[resource]) for resource in RESOURCES}


def bytes_in_use(measured: Sequence[Schedule], predicted: Schedule) -> ComparedBytes:
    """Return the largest memory of all iterations and the median bytes of storage, beside those of the plan."""
    counts = [schedule.measured for schedule in measured if schedule.measured is not None]
    return ComparedBytes(
        Pair(max(count.device for count in counts), predicted.peak_device_bytes),
        Pair(max(count.host for count in counts), predicted.host_bytes()),
        Pair(median(count.storage_read for count in counts), predicted.moved_bytes("storage_read")),
        Pair(median(count.storage_written for count in counts), predicted.moved_bytes("storage_write")),
    )


def median_schedule(measured: Sequence[Schedule]) -> Schedule:
    """Return the schedule with the median update time; of an even number the shorter of the two."""
    return sorted(measured, key=lambda schedule: schedule.update_s)[(len(measured) - 1) // 2]


def finite_losses(losses: Sequence[float]) -> list[float | None]:
    """Replace losses that are not finite by None."""
    return [loss if math.isfinite(loss) else None for loss in losses]
