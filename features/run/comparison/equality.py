"""Compares two runs of a job: the first difference, and the distance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ebbtide.features.run.comparison.job_runs import JobRun
from ebbtide.features.run.results import ProcessLog


@dataclass(frozen=True)
class Distance:
    """The largest differences between two runs.

    Attributes:
        loss: The relative difference of a loss.
        params: The absolute difference of a parameter at the end.
    """

    loss: float
    params: float


def reason_not_comparable(runs: Sequence[JobRun]) -> str | None:
    """Return why runs show nothing; None if they can be compared."""
    for run in runs:
        if not run.logs:
            return f"no optimizer of torch has stepped under {run.name}"
        for log in run.logs:
            if not log.values("loss") or not log.values("final"):
                return f"rank {log.rank} has no loss, or no end, under {run.name}"
    ranks = {tuple(log.rank for log in run.logs) for run in runs}
    if len(ranks) > 1:
        return f"other ranks have stepped in each run: {sorted(ranks)}"
    return None


def first_difference(one: JobRun, other: JobRun) -> str | None:
    """Return what differs first, in the order in which a step computes.

    None if all losses and final parameters have equal bits on all ranks.
    """
    for pair in zip(one.logs, other.logs, strict=True):
        for look in _LOOKS:
            difference = look(*pair)
            if difference is not None:
                return f"{difference} (rank {pair[0].rank})"
    return None


def _first_weights(one: ProcessLog, other: ProcessLog) -> str | None:
    if one.values("start")[:1] == other.values("start")[:1]:
        return None
    return "the weights before the first step: they are not seeded"


def _first_loss(one: ProcessLog, other: ProcessLog) -> str | None:
    if one.values("loss")[:1] == other.values("loss")[:1]:
        return None
    return "the first loss: data, their order or dropout are not seeded"


def _first_gradients(one: ProcessLog, other: ProcessLog) -> str | None:
    # Of the first optimizer alone: others come after its update.
    if one.values("gradient")[:1] == other.values("gradient")[:1]:
        return None
    return "the first gradients: kernels of the backward are not deterministic"


def _later_loss(one: ProcessLog, other: ProcessLog) -> str | None:
    steps = one.values("loss", "step")
    pairs = zip(one.values("loss"), other.values("loss"), strict=False)
    for number, (own, others) in enumerate(pairs):
        if own != others:
            return f"loss {number}, of step {steps[number]}"
    counts = len(one.values("loss")), len(other.values("loss"))
    if counts[0] != counts[1]:
        return f"the number of backwards: {counts[0]} and {counts[1]}"
    return None


def _final_params(one: ProcessLog, other: ProcessLog) -> str | None:
    if one.values("final") == other.values("final"):
        return None
    return "the parameters after the last step"


_LOOKS: tuple[Callable[[ProcessLog, ProcessLog], str | None], ...] = (
    _first_weights,
    _first_loss,
    _first_gradients,
    _later_loss,
    _final_params,
)


def distance(one: JobRun, other: JobRun) -> Distance:
    """Return how far two runs are from each other, on any rank."""
    losses = [abs(a - b) / max(abs(a), 1e-30) for a, b in _loss_pairs(one, other)]
    params = [0.0]
    for log, other_log in zip(one.logs, other.logs, strict=False):
        if log.params_path.exists() and other_log.params_path.exists():
            params.append(_params_distance(log, other_log))
    return Distance(max(losses, default=0.0), max(params))


def max_ulp(one: JobRun, other: JobRun) -> float:
    """Return the largest difference of losses in units of the last place of fp32."""
    return max(
        (
            abs(a - b) / float(np.spacing(np.float32(abs(a))))
            for a, b in _loss_pairs(one, other)
        ),
        default=0.0,
    )


def _loss_pairs(one: JobRun, other: JobRun) -> Iterator[tuple[float, float]]:
    """Yield the losses of two runs that are numbers in both, of all ranks."""
    for log, other_log in zip(one.logs, other.logs, strict=False):
        values = log.values("loss", "value"), other_log.values("loss", "value")
        for a, b in zip(*values, strict=False):
            if a == a and b == b:
                yield a, b


def _params_distance(log: ProcessLog, other: ProcessLog) -> float:
    largest = 0.0
    own, others = torch.load(log.params_path), torch.load(other.params_path)
    for a, b in zip(own, others, strict=False):
        if a.shape != b.shape or not a.numel():
            continue
        difference = (a.double() - b.double()).abs()
        # Where both are not numbers, they are equal.
        difference[a.isnan() & b.isnan()] = 0.0
        largest = max(largest, float(difference.nan_to_num(float("inf")).max()))
    return largest
