"""Placement of intervals on lanes, so that on each lane they nest or do not overlap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Ints


def assign_lanes(starts: Ints, ends: Ints, parents: Sequence[int | None] | None = None) -> tuple[Ints, Ints]:
    """Return (drawing order, lane of each interval). In the drawing order times rise, and a parent comes before the
    intervals nested in it.

    An interval shares the lane of its parent (an index, or None) if it is within the parent and does not overlap a
    sibling on that lane. Otherwise it gets a lane that is free for all of its time. Intervals without parents need the
    fewest lanes possible.
    """
    # Intervals without length go first: they have ended when the intervals that begin with them begin.
    order = np.lexsort((-ends, ends > starts, starts))
    lanes = np.zeros(len(starts), np.int64)
    nests: list[list[int]] = []  # per lane, the open intervals, each within the one before
    busy_lanes: list[tuple[int, int]] = []  # (end, lane)
    free_lanes: list[int] = []
    for index in order.tolist():
        start, end = int(starts[index]), int(ends[index])
        parent = parents[index] if parents is not None else None
        if parent is not None and 0 <= parent < len(lanes) and nests and end <= ends[parent]:
            nest = nests[lanes[parent]]
            while nest and ends[nest[-1]] <= start:
                nest.pop()
            if nest and nest[-1] == parent:
                nest.append(index)
                lanes[index] = lanes[parent]
                continue
        while busy_lanes and busy_lanes[0][0] <= start:
            heapq.heappush(free_lanes, heapq.heappop(busy_lanes)[1])
        if not free_lanes:
            free_lanes.append(len(nests))
            nests.append([])
        lane = heapq.heappop(free_lanes)
        nests[lane] = [index]
        heapq.heappush(busy_lanes, (end, lane))
        lanes[index] = lane
    return order, lanes


def any_overlap(starts: Ints, ends: Ints) -> bool:
    """Return whether any two of the intervals share time."""
    order = np.lexsort((ends, starts))
    return bool((starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any())
