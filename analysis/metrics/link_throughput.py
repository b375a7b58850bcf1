"""What a rank's link moved in one direction: exact where copies were recorded, else from sampled counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import link_peak, main_device
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, cumulative, union
from ebbtide.profiler.trace import Trace

DIRECTIONS = ("h2d", "d2h")
# A sample stands for the time since the one before; after a hole of this many times the usual spacing for its window.
_MOST_SPACINGS = 5
# Where samples cover less of an interval than this, its bytes are not known.
_LEAST_COVERED = 0.5
# Readings of a link's rate may be so much above its peak by rounding; beyond that they are false.
_ABOVE_PEAK = 1.02

Total = Callable[[Ints], Floats]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one direction over time.

    total: bytes moved by a time, NaN where copies have no sizes. covered: ns of known time by a time, None where all is
    known (copies). busy: ns in which copies ran by a time, None where only counters tell. false_samples: how many were
    left out because no link has such rates: beyond its peak, negative, infinite. resolution_ns: how far samples lie
    apart, 0 for copies; of a shorter time they tell no more than of what lies around it.
    """

    total: Total
    covered: Total | None
    busy: Total | None
    false_samples: int = 0
    resolution_ns: float = 0.0

    def bytes(self, starts: Ints, ends: Ints) -> Floats:
        """Bytes moved in each interval (ns); NaN where samples cover less than half of it. Where they cover a part,
        the rest is taken to be like it."""
        moved = self.total(ends) - self.total(starts)
        if self.covered is None:
            return moved
        known = self.covered(ends) - self.covered(starts)
        length = (ends - starts).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = np.where(known > 0, moved * length / known, np.where(length > 0, np.nan, 0.0))
        enough: Floats = np.where(known >= _LEAST_COVERED * length, whole, np.nan)
        return enough

    def idle_share(self, starts: Ints, ends: Ints, peak: float | None) -> Floats:
        """The share of each interval (ns) in which nothing moved: 1 - busy of copies, else 1 - rate / peak (bytes/s);
        NaN where neither is known."""
        length = np.maximum(ends - starts, 1).astype(np.float64)
        if self.busy is not None:
            share = (self.busy(ends) - self.busy(starts)) / length
        elif peak:
            share = self.bytes(starts, ends) / (peak * length / 1e9)
        else:
            return np.full(len(starts), np.nan)
        idle: Floats = np.clip(1.0 - share, 0.0, 1.0)
        return idle


@once_per_trace
def traffic(trace: Trace, rank: int, direction: str) -> Traffic | None:
    """What a rank moved in a direction; None where neither copies nor counters were recorded."""
    if trace.rank(rank).get("transfers_recorded"):
        return of_copies(copies(trace, rank, direction))
    return _of_counters(trace, rank, direction)


def copies(trace: Trace, rank: int, direction: str | None) -> pd.DataFrame:
    """Rows of the table `transfers`, of one direction or all: those of the rank's first device, as with counters."""
    rows = trace.transfers(rank)
    ours = rows["device"] == main_device(trace, rank)
    rows = rows[ours] if ours.any() else rows
    return rows if direction is None else rows[rows["direction"] == direction]


def of_copies(rows: pd.DataFrame) -> Traffic:
    """Of rows of the table `transfers`. Copies without a size count as time, not as bytes; where none has one, the
    bytes are not known."""
    sized = rows[rows["bytes"].notna()]
    if len(rows) and sized.empty:
        return Traffic(lambda at: np.full(len(at), np.nan), None, _busy(rows))
    starts, ends = sized["start_ns"].to_numpy(np.int64), sized["end_ns"].to_numpy(np.int64)
    total = cumulative(starts, ends, sized["bytes"].to_numpy(np.float64))
    return Traffic(total, None, _busy(rows))


@once_per_trace
def both_busy(trace: Trace, rank: int) -> Total | None:
    """ns by a time in which copies ran in both directions at once; None where copies were not recorded."""
    if not trace.rank(rank).get("transfers_recorded"):
        return None
    one, other, either = (_busy(copies(trace, rank, way)) for way in ("h2d", "d2h", None))
    return lambda at: one(at) + other(at) - either(at)


def _busy(rows: pd.DataFrame) -> Total:
    """ns by a time in which at least one of the copies ran."""
    return covering(*union(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)))


def covering(starts: Ints, ends: Ints) -> Total:
    """ns by a time that lie within one of some intervals, which are apart and in order."""
    before = np.append(0, np.cumsum(ends - starts))

    def total(at: Ints) -> Floats:
        place = np.searchsorted(starts, at, side="right")
        last = np.maximum(place - 1, 0)
        inside = np.minimum(at, ends[last]) - starts[last] if len(starts) else np.zeros(len(at), np.int64)
        return np.where(place > 0, before[last] + inside, 0).astype(np.float64)

    return total


def _of_counters(trace: Trace, rank: int, direction: str) -> Traffic | None:
    column = f"{direction}_bytes_per_s"
    rows = trace.link(rank)
    rows = rows[(rows["device"] == main_device(trace, rank)) & rows[column].notna()]
    if rows.empty:
        return None
    ends = rows["t_ns"].to_numpy(np.int64)
    windows = rows["window_ns"].to_numpy(np.int64)
    rates = rows[column].to_numpy(np.float64)
    # A sample stands for the time since the one before, of which its window may be but a part.
    spacing = np.diff(ends, prepend=ends[0] - windows[0])
    hole = spacing > _MOST_SPACINGS * np.median(spacing)
    starts = ends - np.where(hole, np.minimum(windows, spacing), spacing)
    peak = link_peak(trace, rank)
    true = (rates >= 0) & (rates <= peak * _ABOVE_PEAK if peak else np.isfinite(rates))
    starts, ends, rates = starts[true], ends[true], rates[true]
    total = cumulative(starts, ends, rates * (ends - starts) / 1e9)
    return Traffic(total, covering(*union(starts, ends)), None, int((~true).sum()), float(np.median(spacing)))
