"""Laying intervals out on lanes, so that on each lane they nest or lie apart."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Ints


def lay_out(starts: Ints, ends: Ints, parents: Sequence[int | None] | None = None) -> tuple[Ints, Ints]:
    """(the order to draw the intervals in, the lane of each interval): the fewest lanes for intervals without parents.

    starts, ends: ns, no end before its start. parents: for each interval the place of another one, or None. An
    interval lies on the lane of its parent if it lies within it and no sibling is in the way, else on a lane that is
    free for all of its time. In the order, times rise, and a parent comes before what is nested in it.
    """
    # Those without length go first: then they are past when what begins with them begins.
    order = np.lexsort((-ends, ends > starts, starts))
    lanes = np.zeros(len(starts), np.int64)
    nests: list[list[int]] = []  # per lane, the intervals that are open, each within the one before
    taken: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    for one in order.tolist():
        start, end = int(starts[one]), int(ends[one])
        parent = parents[one] if parents is not None else None
        if parent is not None and 0 <= parent < len(lanes) and nests and end <= ends[parent]:
            nest = nests[lanes[parent]]
            while nest and ends[nest[-1]] <= start:
                nest.pop()
            if nest and nest[-1] == parent:
                nest.append(one)
                lanes[one] = lanes[parent]
                continue
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            free.append(len(nests))
            nests.append([])
        lane = heapq.heappop(free)
        nests[lane] = [one]
        heapq.heappush(taken, (end, lane))
        lanes[one] = lane
    return order, lanes


def overlap(starts: Ints, ends: Ints) -> bool:
    """Whether any two of the intervals have time in common."""
    order = np.lexsort((ends, starts))
    return bool((starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any())
