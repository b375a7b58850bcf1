"""Computes the bytes that a rank's link moves over time, exactly from recorded copies,
else from sampled counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.metrics.devices import link_peak, main_device
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.timeseries.step_functions import (
    Floats,
    Ints,
    covered_until,
    cumulative,
    union,
)
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools
from ebbtide.profiler.trace.link_samples import sample_starts, valid_rates

DIRECTIONS = ("h2d", "d2h")
# Where samples cover less than this share of an interval, its bytes are not known.
_MIN_COVERED = 0.5

# Running total by time: of bytes, or of ns.
Total = Callable[[Ints], Floats]
# Amount in each interval, by starts and ends.
Between = Callable[[Ints, Ints], Floats]
# (start, end) of the time in which copies were recorded, ns; none: at all times.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Traffic:
    """Bytes that the link moves in one direction over time."""

    total: Total  # Bytes moved by a time; NaN where copies have no sizes.
    # Sampled time by a time, ns; None where all time is known (copies that were
    # recorded all the time).
    covered: Total | None
    # Time in which copies ran between two times, ns; None where only counters were
    # recorded.
    busy: Between | None
    # Number of samples left out because no link has such rates: above its peak,
    # negative, infinite.
    rejected_samples: int = 0
    # Spacing of the samples, 0 for copies. The figures of a shorter interval describe
    # its surroundings.
    resolution_ns: float = 0.0

    def bytes(self, starts: Ints, ends: Ints) -> Floats:
        """Return the bytes moved in each interval (ns).

        Where samples cover a part of it, the remainder has the same rate; NaN where
        they cover less than half.
        """
        moved = self.total(ends) - self.total(starts)
        if self.covered is None:
            return moved
        covered = self.covered(ends) - self.covered(starts)
        length = (ends - starts).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(
                covered > 0, moved * length / covered, np.where(length > 0, np.nan, 0.0)
            )
        enough: Floats = np.where(covered >= _MIN_COVERED * length, scaled, np.nan)
        return enough

    def idle_share(self, starts: Ints, ends: Ints, peak: float | None) -> Floats:
        """Return the share of each interval (ns) in which nothing moved: 1 - the busy
        share of copies, else 1 - rate / peak (bytes/s); NaN where neither is known."""
        length = np.maximum(ends - starts, 1).astype(np.float64)
        if self.busy is not None:
            share = self.busy(starts, ends) / length
        elif peak:
            share = self.bytes(starts, ends) / (peak * length / 1e9)
        else:
            return np.full(len(starts), np.nan)
        idle: Floats = np.clip(1.0 - share, 0.0, 1.0)
        return idle


@recent_per_trace
def traffic(trace: Trace, rank: int, direction: str) -> Traffic | None:
    """Return the traffic of a rank in one direction.

    Return None where neither copies nor counters were recorded.
    """
    if trace.rank(rank).transfers_recorded:
        return of_copies(
            copies(trace, rank, direction), trace.rank(rank).transfers_spans_ns
        )
    return _of_counters(trace, rank, direction)


class Copies(NamedTuple):
    """Copies between host and device as arrays, an entry each, in order of time."""

    starts: Ints  # ns
    ends: Ints  # ns
    bytes: Floats  # NaN where not recorded.
    directions: npt.NDArray[np.object_]
    # `pinned`, `pageable`; None where not recorded.
    host_memory: npt.NDArray[np.object_]

    def only(self, selected: Bools | Ints) -> Copies:
        return Copies._make(values[selected] for values in self)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the copies whose size was recorded; None if there is none."""
        sized = self.bytes[~np.isnan(self.bytes)]
        return int(sized.astype(np.int64).sum()) if len(sized) else None


def copies(trace: Trace, rank: int, direction: str | None) -> Copies:
    """Return copies in one direction, or in both if it is None, of the rank's first
    device, or all where no copy is of this device."""
    rows = _all_copies(trace, rank)
    return rows if direction is None else rows.only(rows.directions == direction)


@recent_per_trace
def _all_copies(trace: Trace, rank: int) -> Copies:
    rows = trace.columns(rank, "transfers")
    texts = rows.texts("direction"), rows.texts("host_memory")
    table = Copies(
        rows.ints("start_ns"), rows.ints("end_ns"), rows.floats("bytes"), *texts
    )
    ours = rows.equal("device", main_device(trace, rank))
    return table.only(ours) if ours.any() else table


def of_copies(rows: Copies, spans: Spans = ()) -> Traffic:
    """Return the traffic of copies of a rank whose `transfers_spans_ns` are `spans`.
    Those without a size count as busy time alone; the bytes are not known where no copy
    has a size."""
    covered = covering(*np.array(spans, np.int64).T) if spans else None
    sized = rows.only(~np.isnan(rows.bytes))
    if len(rows.starts) and not len(sized.starts):
        return Traffic(
            lambda times: np.full(len(times), np.nan),
            covered,
            busy_between(rows, spans),
        )
    return Traffic(
        cumulative(sized.starts, sized.ends, sized.bytes),
        covered,
        busy_between(rows, spans),
    )


def moved_bytes(trace: Trace, rank: int, direction: str) -> int | None:
    """Return the bytes moved from the first to the last record of a rank.

    Return None where they are not known.
    """
    moved, span = traffic(trace, rank, direction), trace.span_ns(rank)
    if moved is None or span is None:
        return None
    (size,) = np.diff(moved.total(np.array(span, np.int64)))
    return None if np.isnan(size) else round(size)


@once_per_trace
def copied_iterations(trace: Trace, rank: int) -> list[int]:
    """Return the steady iterations in which all copies of a rank were recorded."""
    numbers, spans = (
        steady_iterations(trace).numbers,
        trace.rank(rank).transfers_spans_ns,
    )
    if not spans or not numbers:
        return numbers
    phases = intervals(trace, rank).times_with_other
    ran, position = np.unique(phases.iterations, return_inverse=True)
    starts, ends = (
        np.full(len(ran), np.iinfo(np.int64).max),
        np.full(len(ran), np.iinfo(np.int64).min),
    )
    np.minimum.at(starts, position, phases.starts)
    np.maximum.at(ends, position, phases.ends)
    recorded = covering(*np.array(spans, np.int64).T)
    whole = recorded(ends) - recorded(starts) == ends - starts
    return [int(iteration) for iteration in ran[whole & np.isin(ran, numbers)]]


@recent_per_trace
def both_busy(trace: Trace, rank: int) -> Between | None:
    """Return a function from starts and ends to the ns of copies in both directions at
    once; None if not recorded."""
    if not trace.rank(rank).transfers_recorded:
        return None
    spans = trace.rank(rank).transfers_spans_ns
    h2d, d2h, either = (
        busy_between(copies(trace, rank, direction), spans)
        for direction in (*DIRECTIONS, None)
    )
    return lambda starts, ends: (
        h2d(starts, ends) + d2h(starts, ends) - either(starts, ends)
    )


def busy_between(rows: Copies, spans: Spans) -> Between:
    """Return a function from starts and ends of intervals to the ns in which at least
    one copy ran; NaN for intervals that are not within the spans."""
    total = covering(*union(rows.starts, rows.ends))
    recorded = covering(*np.array(spans, np.int64).T) if spans else None

    def busy_ns(starts: Ints, ends: Ints) -> Floats:
        busy = total(ends) - total(starts)
        if recorded is None:
            return busy
        return np.where(
            recorded(ends) - recorded(starts) == ends - starts, busy, np.nan
        )

    return busy_ns


def covering(starts: Ints, ends: Ints) -> Total:
    """Return `covered_until` of disjoint intervals (ns) in order, as floats."""
    covered = covered_until((starts, ends))
    return lambda times: covered(times).astype(np.float64)


class RateSamples(NamedTuple):
    """Samples of a link's counters in one direction, without rates that no link has."""

    starts: Ints  # The beginning of the time that each sample covers, ns.
    ends: Ints  # Its end, ns, ascending.
    bytes_per_s: Floats  # The rates.
    rejected: int  # Number of samples left out.
    spacing_ns: float  # Median spacing of all samples.


@recent_per_trace
def rate_samples(trace: Trace, rank: int, direction: str) -> RateSamples | None:
    """Return the samples of the counters of a rank's first device.

    Return None where there are none.
    """
    column = f"{direction}_bytes_per_s"
    rows = trace.columns(rank, "link")
    selected = rows.equal("device", main_device(trace, rank)) & ~np.isnan(
        rows.floats(column)
    )
    if not selected.any():
        return None
    ends, windows, rates = (
        rows.ints("t_ns")[selected],
        rows.ints("window_ns")[selected],
        rows.floats(column)[selected],
    )
    starts = sample_starts(ends, windows)
    spacing = np.diff(ends, prepend=ends[0] - windows[0])
    valid = valid_rates(rates, link_peak(trace, rank))
    return RateSamples(
        starts[valid],
        ends[valid],
        rates[valid],
        int((~valid).sum()),
        float(np.median(spacing)),
    )


def _of_counters(trace: Trace, rank: int, direction: str) -> Traffic | None:
    samples = rate_samples(trace, rank, direction)
    if samples is None:
        return None
    starts, ends = samples.starts, samples.ends
    total = cumulative(starts, ends, samples.bytes_per_s * (ends - starts) / 1e9)
    return Traffic(
        total,
        covering(*union(starts, ends)),
        None,
        samples.rejected,
        samples.spacing_ns,
    )
