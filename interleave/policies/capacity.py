"""What of the free device memory state and gradients of a placement can have, and from when on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.interleave.model.plan import BACKWARD, OTHER, UPDATE, made_points, point_at
from ebbtide.interleave.model.workload import Workload, value_at

# Where updates follow the gradients: how many kept gradients are there at once.
_WAITING = 2


def slot_points(
    workload: Workload, resident: int, moved: Sequence[int], slots: int, kept: Sequence[int]
) -> list[float]:
    """For each of the slots through which `moved` go in turn, the first point of the iteration from which on there is
    room for it, on top of those before it, beside the state of the first `resident` subgroups and kept gradients;
    UPDATE where there is not before."""
    sizes = workload.subgroups
    room = _room(workload, _waiting_line(workload, kept))
    held = workload.state_bytes * sum(sizes[:resident])
    points = []
    for slot in range(slots):
        # As large as the largest that comes into it.
        held += workload.state_bytes * max(sizes[subgroup] for subgroup in moved[slot::slots])
        points.append(next((point for point, free in room if free >= held), UPDATE))
    return points


def gradients_with_room(
    workload: Workload, resident: range, wanted: Sequence[int], moved: Sequence[int], slots: int
) -> list[int]:
    """Where every update needs all gradients: whose can stay on the device from the backward to the update, the first
    of those wanted, beside resident state and the slots that `moved` go through."""
    if workload.gradients_stay:
        return list(wanted)
    sizes, line = np.array(workload.subgroups), workload.gpu_free or ((0.0, 0.0),)
    begin = workload.compute_s - workload.backward_s
    # A gradient takes its room as the backward begins to make it.
    made = begin + workload.backward_s * (np.cumsum(sizes[::-1])[::-1] - sizes) / workload.params
    home = workload.state_bytes * float(sizes[list(resident)].sum())
    passing = slots * workload.state_bytes * max((workload.subgroups[subgroup] for subgroup in moved), default=0)
    edges = [at for at, _ in line if begin < at <= workload.compute_s] + [workload.compute_s]
    room = [(end, value_at(line, start) - home) for start, end in zip([begin, *edges[:-1]], edges, strict=True)]
    room.append((np.inf, min(size for at, size in workload.gpu_free_from(workload.compute_s)) - home - passing))
    candidates = np.array(wanted, dtype=int)
    held = sizes[candidates] * workload.grad_bytes
    most = len(candidates)
    for end, size in room:
        taken = list(accumulate(np.where(made[candidates] < end, held, 0.0)))
        most = min(most, int(np.searchsorted(taken, max(size, -1.0), side="right")))
    return list(wanted[:most])


def _waiting_line(workload: Workload, kept: Sequence[int]) -> list[tuple[float, float]]:
    """(point, bytes of kept gradients on the device from there on), as the backward begins to make them. Where nothing
    clips each goes with its update."""
    sizes, line = workload.subgroups, [(OTHER, 0.0)]
    if workload.gradients_stay:
        return line
    if not workload.waits:
        most = workload.grad_bytes * max((sizes[subgroup] for subgroup in kept), default=0)
        return [*line, (BACKWARD, most * min(len(kept), _WAITING))]
    begins = [*made_points(workload)[1:], BACKWARD]
    for subgroup in sorted(kept, reverse=True):
        line.append((begins[subgroup], line[-1][1] + workload.grad_bytes * sizes[subgroup]))
    return line


def _room(workload: Workload, kept: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(point, bytes that are free beside kept gradients at every moment from there to the end of the update), where
    that grows."""
    free = [(point_at(workload, at), size) for at, size in workload.gpu_free or ()]
    points = np.unique([point for point, _ in (*free, *kept)] + [UPDATE])
    least = np.minimum.accumulate((_values(free, points) - _values(kept, points))[::-1])[::-1]
    return list(zip(points.tolist(), least.tolist(), strict=True))


def _values(line: list[tuple[float, float]], points: Floats) -> Floats:
    """A step function at some points; 0 before it begins."""
    at, values = np.array([*line, (np.inf, 0.0)]).T
    place = np.searchsorted(at, points, side="right")
    found: Floats = np.append(0.0, values)[place]
    return found
