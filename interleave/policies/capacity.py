"""Room for state and gradients in the free device memory: how much a placement may use, and from when on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.interleave.model.plan import BACKWARD, OTHER, UPDATE, gradient_ready_points, point_at
from ebbtide.interleave.model.workload import Workload, value_at

# Kept gradients on the device at once, if each update follows its gradient.
_GRADIENTS_IN_FLIGHT = 2
# Bytes by point of the iteration, a step function: (point, bytes from there on).
_PointSteps = list[tuple[float, float]]


def subgroups_that_fit(workload: Workload, free_bytes: float | None) -> int:
    """Return how many subgroups, counted from the first, have state that fits into so much memory (None: nothing)."""
    return bisect_right(list(accumulate(workload.subgroups)), (free_bytes or 0.0) / workload.state_bytes * (1 + 1e-9))


def slot_points(
    workload: Workload, resident: int, moved: Sequence[int], slots: int, kept: Sequence[int]
) -> list[float]:
    """Return for each slot the first point of the iteration from which on there is memory for it.

    Each slot needs memory in addition to the slots before it, resident state and kept gradients.

    Args:
        workload: The workload to plan for.
        resident: Number of resident subgroups, which are the first ones.
        moved: Subgroups that pass through the slots in turn.
        slots: Number of slots.
        kept: Subgroups whose gradients stay on the device until their update.

    Returns:
        A point per slot; UPDATE for slots that have no memory before it.
    """
    sizes = workload.subgroups
    free_steps = _free_until_end(workload, _kept_gradient_steps(workload, kept))
    needed = workload.state_bytes * sum(sizes[:resident])
    points = []
    for slot in range(slots):
        # A slot is as large as the largest subgroup that passes through it.
        needed += workload.state_bytes * max(sizes[subgroup] for subgroup in moved[slot::slots])
        points.append(next((point for point, free in free_steps if free >= needed), UPDATE))
    return points


def gradients_that_fit(
    workload: Workload, resident: range, candidates: Sequence[int], moved: Sequence[int], slots: int
) -> list[int]:
    """Return the first of the candidates whose gradients fit on the device from the backward to the update.

    For workloads in which every update needs all gradients. Gradients share the free memory with resident state and
    the slots.

    Args:
        workload: The workload to plan for.
        resident: Subgroups whose state is resident.
        candidates: Subgroups whose gradients should stay, in order of preference.
        moved: Subgroups that pass through the slots.
        slots: Number of slots.
    """
    if workload.gradients_held_until_step:
        return list(candidates)
    sizes, free_steps = np.array(workload.subgroups), workload.gpu_free or ((0.0, 0.0),)
    begin = workload.compute_s - workload.backward_s
    # A gradient takes its memory when the backward starts to compute it.
    allocated_at = begin + workload.backward_s * (np.cumsum(sizes[::-1])[::-1] - sizes) / workload.params
    resident_bytes = workload.state_bytes * float(sizes[list(resident)].sum())
    slot_bytes = slots * workload.state_bytes * max((workload.subgroups[subgroup] for subgroup in moved), default=0)
    edges = [time for time, _ in free_steps if begin < time <= workload.compute_s] + [workload.compute_s]
    limits = [
        (end, value_at(free_steps, start) - resident_bytes)
        for start, end in zip([begin, *edges[:-1]], edges, strict=True)
    ]
    least_in_update = min(size for _, size in workload.gpu_free_from(workload.compute_s))
    limits.append((np.inf, least_in_update - resident_bytes - slot_bytes))
    indices = np.array(candidates, dtype=int)
    gradient_bytes = sizes[indices] * workload.grad_bytes
    count = len(indices)
    for end, limit in limits:
        totals = list(accumulate(np.where(allocated_at[indices] < end, gradient_bytes, 0.0)))
        count = min(count, int(np.searchsorted(totals, max(limit, -1.0), side="right")))
    return list(candidates[:count])


def _kept_gradient_steps(workload: Workload, kept: Sequence[int]) -> _PointSteps:
    """Return the bytes of kept gradients on the device, counted from when the backward starts to compute them.

    If each update follows its gradient, only a few gradients are there at once.
    """
    sizes, steps = workload.subgroups, [(OTHER, 0.0)]
    if workload.gradients_held_until_step:
        return steps
    if not workload.needs_all_gradients:
        largest = workload.grad_bytes * max((sizes[subgroup] for subgroup in kept), default=0)
        return [*steps, (BACKWARD, largest * min(len(kept), _GRADIENTS_IN_FLIGHT))]
    starts = [*gradient_ready_points(workload)[1:], BACKWARD]
    for subgroup in sorted(kept, reverse=True):
        steps.append((starts[subgroup], steps[-1][1] + workload.grad_bytes * sizes[subgroup]))
    return steps


def _free_until_end(workload: Workload, kept: _PointSteps) -> _PointSteps:
    """Return the bytes that stay free, kept gradients deducted, from each point to the end of the update."""
    free = [(point_at(workload, time), size) for time, size in workload.gpu_free or ()]
    points = np.unique([point for point, _ in (*free, *kept)] + [UPDATE])
    min_until_end = np.minimum.accumulate((_values(free, points) - _values(kept, points))[::-1])[::-1]
    return list(zip(points.tolist(), min_until_end.tolist(), strict=True))


def _values(steps: _PointSteps, points: Floats) -> Floats:
    """Return the values of a step function at some points; 0 before it begins."""
    starts, values = np.array([*steps, (np.inf, 0.0)]).T
    indices = np.searchsorted(starts, points, side="right")
    result: Floats = np.append(0.0, values)[indices]
    return result
