"""Step functions and rates over time, exactly: a sample holds from its time until the next one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def peak_between(times: Ints, values: Ints, starts: Ints, ends: Ints) -> Floats:
    """The largest value of a step function over each interval [start, end], its ends included.

    times: sorted, ns. Before its first sample the function has no value; NaN where an interval has none at all.
    """
    peaks = np.full(len(starts), np.nan)
    if not len(times):
        return peaks
    first = np.maximum(np.searchsorted(times, starts, side="right") - 1, 0)
    after = np.searchsorted(times, ends, side="right")
    known = after > first
    if known.any():
        bounds = np.stack([first[known], after[known]], axis=1).ravel()
        padded = np.append(values, np.iinfo(np.int64).min)
        peaks[known] = np.maximum.reduceat(padded, bounds)[::2]
    return peaks


def cumulative(starts: Ints, ends: Ints, amounts: Floats) -> Callable[[Ints], Floats]:
    """The total that has passed by a time, where each amount passes evenly between its start and end.

    Amounts may overlap in time. Returns a function of times (ns); differences of it are exact amounts.
    """
    if not len(starts):
        return lambda at: np.zeros(len(at))
    # An amount that takes no time passes in the nanosecond before its end.
    begins = np.minimum(starts, ends - 1)
    rates = amounts / (ends - begins)
    times = np.concatenate([begins, ends])
    changes = np.concatenate([rates, -rates])
    order = np.argsort(times, kind="stable")
    times, rate = times[order], np.cumsum(changes[order])
    # Where nothing is on its way the rate is 0, not what rounding left of it.
    rate[np.cumsum(np.sign(changes[order])) == 0] = 0.0
    totals = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(times))])
    begin, since = times[0], (times - times[0]).astype(np.float64)
    return lambda at: np.interp((at - begin).astype(np.float64), since, totals)


def union(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """(starts, ends) of the stretches that at least one interval covers, apart and in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > reached[:-1])
    return starts[new], reached[np.append(new[1:], True)]


def union_length(starts: Ints, ends: Ints) -> int:
    """How long at least one of the intervals lasts, ns."""
    starts, ends = union(starts, ends)
    return int((ends - starts).sum())


def thinned(times: Ints, values: Ints, most: int) -> tuple[Ints, Ints]:
    """A step function by at most `most` (at least 4) of its samples: where it has more, the first, the last, and of
    each stretch between them the smallest and the largest value."""
    count = len(times)
    if count <= most:
        return times, values
    stretch = -(-count // ((most - 2) // 2))
    base = np.arange(0, count, stretch)
    # The last stretch is filled up with its last value, which changes no extreme.
    folded = np.pad(values, (0, len(base) * stretch - count), mode="edge").reshape(-1, stretch)
    extremes = [base + folded.argmin(axis=1), base + folded.argmax(axis=1)]
    keep = np.unique(np.concatenate([[0, count - 1], *extremes]).clip(max=count - 1))
    return times[keep], values[keep]
