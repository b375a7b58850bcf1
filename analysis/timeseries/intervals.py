"""Exact operations on unions of intervals: disjoint intervals in order, as `step_functions.union` returns them."""

from __future__ import annotations

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Ints, union

# (starts, ends), ns: disjoint and in order.
Union = tuple[Ints, Ints]


def length(intervals: Union) -> int:
    """Return the total length of disjoint intervals, ns."""
    starts, ends = intervals
    return int((ends - starts).sum())


def merged(*intervals: Union) -> Union:
    """Return the union of several unions."""
    starts, ends = (np.concatenate([part[side] for part in intervals]) for side in (0, 1))
    return union(starts, ends)


def intersection(first: Union, second: Union) -> Union:
    """Return the time that two unions share."""
    (starts, ends), (other_starts, other_ends) = first, second
    begin = np.searchsorted(other_ends, starts, side="right")
    counts = np.maximum(np.searchsorted(other_starts, ends, side="left") - begin, 0)
    # Each interval with each of those of the other union that it overlaps.
    own = np.repeat(np.arange(len(starts)), counts)
    other = np.arange(len(own)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
    return np.maximum(starts[own], other_starts[other]), np.minimum(ends[own], other_ends[other])


def difference(first: Union, second: Union) -> Union:
    """Return the time of the first union that the second does not cover."""
    limits = np.iinfo(np.int64)
    starts, ends = second
    return intersection(first, (np.append(limits.min, ends), np.append(starts, limits.max)))


def overlap_ns(starts: Ints, ends: Ints, intervals: Union) -> Ints:
    """Return how much of each interval [start, end), ns, a union covers."""
    covered_starts, covered_ends = intervals
    before = np.append(0, np.cumsum(covered_ends - covered_starts))

    def covered_until(times: Ints) -> Ints:
        count = np.searchsorted(covered_starts, times, side="right")
        last = np.maximum(count - 1, 0)
        inside = np.minimum(times, covered_ends[last]) - covered_starts[last] if len(covered_starts) else times * 0
        return np.where(count > 0, before[last] + inside, 0)

    return covered_until(ends) - covered_until(starts)


def union_length_by_group(groups: Ints, starts: Ints, ends: Ints, count: int) -> Ints:
    """Return the length of the union of the intervals of each group, ns.

    Args:
        groups: Number of the group of each interval, from 0 and less than `count`.
        starts: Start of each interval, ns.
        ends: End of each interval, ns.
        count: Number of groups.
    """
    if not len(starts):
        return np.zeros(count, np.int64)
    begin, span = int(starts.min()), int(ends.max()) - int(starts.min()) + 1
    # Groups one after the other on one axis, so that intervals of different groups do not meet.
    shift = groups * span - begin
    united_starts, united_ends = union(starts + shift, ends + shift)
    lengths = np.zeros(count, np.int64)
    np.add.at(lengths, united_starts // span, united_ends - united_starts)
    return lengths
