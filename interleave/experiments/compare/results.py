"""What was measured, beside what was predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ebbtide.interleave.experiments.compare.job import Shape
from ebbtide.interleave.experiments.compare.testbed import Box
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.model.schedule import Schedule

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class Pair:
    measured: float
    predicted: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None

    def as_json(self) -> dict[str, float | None]:
        return {"measured": self.measured, "predicted": self.predicted, "ratio": self.ratio}


@dataclass(frozen=True)
class Result:
    """One policy. Times in ms, medians over the `counted` iterations; busy: shares of the update, by resource.
    losses: of all iterations; None for one that is no number. losses_equal: to the first policy's, bit for bit.
    measured: the iteration in the middle of all, by its update; predicted: of the same plan."""

    policy: str
    counted: int
    times: dict[str, Pair]
    busy: dict[str, Pair]
    peak_device_bytes: Pair
    losses: list[float | None]
    losses_equal: bool
    measured: Schedule
    predicted: Schedule

    def as_json(self) -> dict[str, Any]:
        times = {f"{phase}_ms": pair.as_json() for phase, pair in self.times.items()}
        busy = {resource: pair.as_json() for resource, pair in self.busy.items()}
        peak = self.peak_device_bytes.as_json()
        losses = {"final_loss": self.losses[-1], "losses_equal": self.losses_equal, "losses": self.losses}
        return {
            "policy": self.policy,
            "counted": self.counted,
            **times,
            "busy": busy,
            "peak_device_bytes": peak,
            **losses,
        }


@dataclass(frozen=True)
class PeerResult:
    """Another optimizer, measured alone. Times in ms."""

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
    """iterations: all of each run; warmup_iterations of them are left out of medians. skipped: policies and peers that
    could not run here, and why."""

    box: Box
    shape: Shape
    subgroup_params: int
    iterations: int
    warmup_iterations: int
    results: list[Result]
    peers: list[PeerResult]
    skipped: dict[str, str]

    @property
    def losses_equal(self) -> bool:
        return all(result.losses_equal for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide compare --json` prints."""
        return {
            "device": {"name": self.box.name, "emulated": self.box.emulated, "memory_budget": self.box.memory_budget},
            "job": {"params": self.shape.params, **asdict(self.shape), "subgroup_params": self.subgroup_params},
            "machine": self.box.machine.as_json(),
            "iterations": self.iterations,
            "warmup_iterations": self.warmup_iterations,
            "losses_equal": self.losses_equal,
            "results": [result.as_json() for result in self.results],
            "peers": [asdict(peer) for peer in self.peers],
            "skipped": self.skipped,
        }


def times_of(measured: Sequence[Schedule], predicted: Schedule) -> dict[str, Pair]:
    """By phase, and of the `iteration`, ms."""
    return {
        phase: Pair(
            1e3 * median(getattr(schedule, f"{phase}_s") for schedule in measured),
            1e3 * getattr(predicted, f"{phase}_s"),
        )
        for phase in ("iteration", *PHASES)
    }


def busy_of(measured: Sequence[Schedule], predicted: Schedule) -> dict[str, Pair]:
    shares, expected = [schedule.busy_shares() for schedule in measured], predicted.busy_shares()
    return {resource: Pair(median(share[resource] for share in shares), expected[resource]) for resource in RESOURCES}


def in_the_middle(measured: Sequence[Schedule]) -> Schedule:
    """The schedule whose update is the median; of an even number the shorter."""
    return sorted(measured, key=lambda schedule: schedule.update_s)[(len(measured) - 1) // 2]


def known(losses: Sequence[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]
