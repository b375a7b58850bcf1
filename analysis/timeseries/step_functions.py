"""Exact step functions and rates over time: a sample holds from its time until the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)


def peak_between(times: Ints, values: Ints, starts: Ints, ends: Ints) -> Floats:
    """Return the largest value of a step function in each interval [start, end], both ends included.

    Args:
        times: Times of the samples, ns, sorted. The function has no value before its first sample.
        values: Value from each time until the next one.
        starts: Start of each interval, ns.
        ends: End of each interval, ns.

    Returns:
        A value per interval; NaN where the function has no value in it.
    """
    peaks = np.full(len(starts), np.nan)
    if not len(times):
        return peaks
    first = np.maximum(np.searchsorted(times, starts, side="right") - 1, 0)
    after = np.searchsorted(times, ends, side="right")
    has_value = after > first
    if has_value.any():
        bounds = np.stack([first[has_value], after[has_value]], axis=1).ravel()
        padded = np.append(values, np.iinfo(np.int64).min)
        peaks[has_value] = np.maximum.reduceat(padded, bounds)[::2]
    return peaks


def cumulative(starts: Ints, ends: Ints, amounts: Floats) -> Callable[[Ints], Floats]:
    """Return the running total of amounts, each of which passes evenly between its start and end.

    Args:
        starts: Start of each amount, ns. Amounts may overlap in time.
        ends: End of each amount, ns.
        amounts: The amounts, for example bytes.

    Returns:
        A function from times (ns) to the total that has passed by each time. Its differences are exact amounts.
    """
    if not len(starts):
        return lambda times: np.zeros(len(times))
    # An amount that takes no time passes in the nanosecond before its end.
    begins = np.minimum(starts, ends - 1)
    rates = amounts / (ends - begins)
    edges = np.concatenate([begins, ends])
    changes = np.concatenate([rates, -rates])
    order = np.argsort(edges, kind="stable")
    edges, rate = edges[order], np.cumsum(changes[order])
    # Where no amount passes the rate is 0, not the remainder of rounding.
    rate[np.cumsum(np.sign(changes[order])) == 0] = 0.0
    totals = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(edges))])
    begin, since = edges[0], (edges - edges[0]).astype(np.float64)
    return lambda times: np.interp((times - begin).astype(np.float64), since, totals)


def merge_times(first: npt.NDArray[Number], second: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the sorted different values of two sorted arrays.

    The same as `np.union1d`, which does not use that they are sorted and takes up to 90 times as long.
    """
    merged = np.concatenate([first, second])
    merged.sort(kind="stable")
    return merged[np.append(True, merged[1:] != merged[:-1])] if len(merged) else merged


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return (starts, ends) of the union of intervals: disjoint and in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > reached[:-1])
    return starts[new], reached[np.append(new[1:], True)]


def union_length(starts: Ints, ends: Ints) -> int:
    """Return the length of the union of intervals, ns."""
    starts, ends = union(starts, ends)
    return int((ends - starts).sum())
