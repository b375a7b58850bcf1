"""Points of an iteration at which gradients are ready and parameters are used."""

from __future__ import annotations

from ebbtide.interleave.model.operations import BACKWARD, FORWARD, UPDATE
from ebbtide.interleave.model.workload import Workload


def gradient_ready_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward has computed each subgroup's gradient.

    The backward computes gradients in reverse: those of subgroup 0 come last.
    """
    points, params_done = [], 0
    for size in reversed(workload.subgroups):
        params_done += size
        points.append(min(BACKWARD + params_done / workload.params, UPDATE))
    return points[::-1]


def backward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the backward first uses the parameters of each subgroup."""
    return [*gradient_ready_points(workload)[1:], BACKWARD]


def forward_points(workload: Workload) -> list[float]:
    """Return the point of the iteration at which the forward first uses the parameters of each subgroup.

    The forward uses subgroups in their order, each for a time in proportion to its parameters.
    """
    points, params_done = [], 0
    for size in workload.subgroups:
        points.append(FORWARD + params_done / workload.params)
        params_done += size
    return points


def point_at(workload: Workload, seconds: float) -> float:
    """Return the point of an iteration that is reached after so many seconds without any waiting."""
    begin = 0.0
    for phase, length in enumerate((workload.other_s, workload.forward_s, workload.backward_s)):
        if seconds < begin + length:
            return phase + max(0.0, (seconds - begin) / length)
        begin += length
    return UPDATE
