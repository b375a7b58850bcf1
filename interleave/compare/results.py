"""Results of a comparison: measured and predicted figures, and the traces of both."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from ebbtide.interleave.compare.runs import Shape
from ebbtide.interleave.compare.testbed import Testbed
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of
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
        return {
            "measured": self.measured,
            "predicted": self.predicted,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class ComparedBytes:
    """Bytes in use by count of the engine and by the plan.

    Memory includes memory for copies; storage is counted in an iteration.
    """

    device: Pair
    host: Pair
    storage_read: Pair
    storage_written: Pair

    @property
    def storage(self) -> Pair:
        """Bytes read from and written to storage in an iteration."""
        read, written = self.storage_read, self.storage_written
        return Pair(
            read.measured + written.measured, read.predicted + written.predicted
        )


@dataclass(frozen=True)
class ComparedPolicy:
    """The measured and predicted figures of one policy."""

    policy: str
    counted: int  # Number of iterations that medians are over.
    # Median in ms of the iteration, of each phase, and of what the optimizer adds to
    # the iteration: `exposed`.
    times: dict[str, Pair]
    busy: dict[str, Pair]
    # Peak of the device memory of the plan, at the measured or predicted times of its
    # operations.
    peak_device_bytes: Pair
    memory: ComparedBytes
    # Loss of every iteration; None for one that is not finite.
    losses: list[float | None]
    losses_equal: bool
    measured: Schedule  # Schedule of the iteration with the median update time.
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
            **{
                f"{field.name}_bytes": getattr(self.memory, field.name).as_json()
                for field in fields(ComparedBytes)
            },
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
    """The results of all policies and baselines."""

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

    @property
    def difference(self) -> str:
        """A sentence on the policies whose losses differ."""
        differing = ", ".join(
            result.policy for result in self.results if not result.losses_equal
        )
        return (
            f"the losses of {differing} differ from those of {self.results[0].policy}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide compare --json` prints."""
        testbed = self.testbed
        return {
            "device": {
                "name": testbed.name,
                "emulated": testbed.emulated,
                "memory_budget": testbed.memory_budget,
            },
            "job": {
                "params": self.shape.params,
                **asdict(self.shape),
                "subgroup_params": self.subgroup_params,
            },
            "machine": testbed.machine.as_json(),
            "iterations": self.iterations,
            "warmup_iterations": self.warmup_iterations,
            "losses_equal": self.losses_equal,
            "results": [result.as_json() for result in self.results],
            "peers": [asdict(baseline) for baseline in self.baselines],
            "skipped": self.skipped,
        }


def compared_policy(
    policy: str,
    measured: Sequence[Schedule],
    predicted: Schedule,
    losses: Sequence[float],
    losses_equal: bool,
) -> ComparedPolicy:
    """Return the medians of schedules beside a prediction.

    Memory is the largest of all schedules.
    """
    shares, expected = (
        [schedule.busy_shares() for schedule in measured],
        predicted.busy_shares(),
    )
    counts = [
        schedule.measured for schedule in measured if schedule.measured is not None
    ]
    read, written = (
        Pair(
            median(getattr(count, name) for count in counts),
            predicted.moved_bytes(resource),
        )
        for name, resource in (
            ("storage_read", "storage_read"),
            ("storage_written", "storage_write"),
        )
    )
    return ComparedPolicy(
        policy=policy,
        counted=len(measured),
        times={
            phase: Pair(
                1e3 * median(getattr(schedule, f"{phase}_s") for schedule in measured),
                1e3 * getattr(predicted, f"{phase}_s"),
            )
            for phase in ("iteration", *PHASES, "exposed")
        },
        busy={
            name: Pair(median(share[name] for share in shares), expected[name])
            for name in RESOURCES
        },
        peak_device_bytes=Pair(
            max(one.peak_device_bytes for one in measured), predicted.peak_device_bytes
        ),
        memory=ComparedBytes(
            device=Pair(
                max(count.device for count in counts), predicted.peak_device_bytes
            ),
            host=Pair(max(count.host for count in counts), predicted.host_bytes()),
            storage_read=read,
            storage_written=written,
        ),
        losses=finite_losses(losses),
        losses_equal=losses_equal,
        # Of an even number the shorter of the two.
        measured=sorted(measured, key=lambda schedule: schedule.update_s)[
            (len(measured) - 1) // 2
        ],
        predicted=predicted,
    )


def finite_losses(losses: Sequence[float]) -> list[float | None]:
    """Replace losses that are not finite by None."""
    return [loss if math.isfinite(loss) else None for loss in losses]


def save_traces(comparison: Comparison, folder: Path) -> None:
    """Write POLICY.measured.ebb and POLICY.predicted.ebb for each policy.

    The measured trace has the iteration with the median update time.
    """
    testbed = comparison.testbed
    device = (
        f"an emulated device with {testbed.link_bytes_per_s:g} B/s"
        if testbed.emulated
        else testbed.name
    )
    for result in comparison.results:
        for half, source in (("measured", "recorded"), ("predicted", "simulated")):
            schedule: Schedule = getattr(result, half)
            # The budget for state says nothing about the memory that the job itself
            # leaves free.
            workload = replace(schedule.workload, gpu_free=None)
            trace = trace_of(
                replace(schedule, workload=workload), testbed.machine, iterations=1
            )
            trace.meta["source"] = source
            trace.note(f"{half} by ebbtide compare: one iteration on {device}")
            trace.write(folder / f"{file_name(result.policy)}.{half}.ebb")
