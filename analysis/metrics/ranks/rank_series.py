"""Computes what ranks are compared by: values of each steady iteration of a rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, main_device
from ebbtide.analysis.metrics.iterations import (
    Intervals,
    IterationTable,
    intervals,
    positions,
    rank_durations,
    steady_iterations,
)
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    copied_iterations,
    rate_samples,
    traffic,
)
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import Trace

# GPUs lower their clocks on purpose while they are idle.
_LOADED_GPU_PERCENT = 50.0


@once_per_trace
def phase_series(trace: Trace, rank: int) -> IterationTable:
    """Return times of a rank by steady iteration, ms; NaN where not recorded. Columns
    `iteration_ms`, `other_ms` and one per phase; `phases_ms`, their sum without
    `other`; `forward_start_ms` and so on, since a time that all ranks share."""
    times = intervals(trace, rank).times
    durations = rank_durations(trace, rank).at(steady_iterations(trace).numbers)
    columns = {
        f"{part}_ms": durations.columns[part]
        for part in ("iteration", *ITERATION_PARTS)
    }
    phases_ms = np.stack([durations.columns[phase] for phase in PHASES])
    columns["phases_ms"] = np.where(
        np.isnan(phases_ms).all(axis=0), np.nan, durations.total(PHASES)
    )
    for phase in PHASES:
        own = times.phases == phase
        numbers, first = np.unique(times.iterations[own], return_index=True)
        starts = IterationTable(
            numbers, {"ms": (times.starts[own][first] - origin_ns(trace)) / 1e6}
        )
        columns[f"{phase}_start_ms"] = starts.at(durations.numbers).columns["ms"]
    return IterationTable(durations.numbers, columns)


@once_per_trace
def rank_series(trace: Trace, rank: int) -> IterationTable:
    """Return values of a rank by steady iteration; NaN where not recorded. Columns of
    `phase_series`; `free_bytes`, the least; `h2d_bytes_per_s` and `d2h_bytes_per_s`,
    the rate of copies while they run, or the highest sampled rate; `h2d_bytes` and
    `d2h_bytes`; `sm_clock_mhz`, the median SM clock of the busy GPU."""
    times = phase_series(trace, rank)
    spans = intervals(trace, rank)
    _, steady = positions(times.numbers, spans.numbers)
    spans = replace(
        spans,
        numbers=spans.numbers[steady],
        starts=spans.starts[steady],
        ends=spans.ends[steady],
    )
    moved = {
        name: values
        for direction in DIRECTIONS
        for name, values in _moved(trace, rank, direction, spans).items()
    }
    others = IterationTable(
        spans.numbers, {"sm_clock_mhz": _clocks(trace, rank, spans), **moved}
    ).at(times.numbers)
    free, pool, capacity = (
        np.full(len(times.numbers), np.nan),
        free_pool(trace),
        capacity_bytes(trace, rank),
    )
    if pool is not None and capacity is not None:
        free = capacity - phase_peaks(trace, rank, pool).at(times.numbers).largest(
            ITERATION_PARTS
        )
    return IterationTable(
        times.numbers, {**times.columns, "free_bytes": free, **others.columns}
    )


@once_per_trace
def origin_ns(trace: Trace) -> int:
    """Return the time that starts of phases count from: the first iteration of the
    first rank."""
    starts = [
        int(start)
        for rank in trace.ranks[:1]
        for start in intervals(trace, rank).starts[:1]
    ]
    return starts[0] if starts else 0


def _moved(
    trace: Trace, rank: int, direction: str, spans: Intervals
) -> dict[str, Floats]:
    """Return the columns of the rate (bytes/s) and of the bytes."""
    moved = traffic(trace, rank, direction)
    numbers, starts, ends = spans.numbers, spans.starts, spans.ends
    if moved is None:
        return dict.fromkeys(
            (f"{direction}_bytes_per_s", f"{direction}_bytes"),
            np.full(len(numbers), np.nan),
        )
    sizes = moved.total(ends) - moved.total(starts)
    samples = None if moved.busy is not None else rate_samples(trace, rank, direction)
    if moved.busy is not None:
        _, recorded = positions(
            np.array(copied_iterations(trace, rank), np.int64), numbers
        )
        busy_s = np.where(recorded, moved.busy(starts, ends) / 1e9, np.nan)
        rates = sizes / np.where(busy_s > 0, busy_s, np.nan)
    elif samples is not None:
        rates = _highest(samples.ends, samples.bytes_per_s, spans)
    else:
        rates = np.full(len(numbers), np.nan)
    return {f"{direction}_bytes_per_s": rates, f"{direction}_bytes": sizes}


def _highest(ends: Ints, rates: Floats, spans: Intervals) -> Floats:
    """Return the highest of the samples that end in each span, NaN without any."""
    first = np.searchsorted(ends, spans.starts, side="right")
    after = np.searchsorted(ends, spans.ends, side="right")
    highest = np.full(len(spans.numbers), np.nan)
    some = after > first
    if some.any():
        bounds = np.stack([first[some], after[some]], axis=1).ravel()
        highest[some] = np.maximum.reduceat(np.append(rates, -np.inf), bounds)[::2]
    return highest


def _clocks(trace: Trace, rank: int, spans: Intervals) -> Floats:
    rows = trace.columns(rank, "gpu")
    clocks = rows.floats("sm_clock_mhz")
    loaded = rows.equal("device", main_device(trace, rank)) & ~np.isnan(clocks)
    loaded &= rows.floats("utilization_percent") >= _LOADED_GPU_PERCENT
    return medians_within(
        rows.ints("t_ns")[loaded], clocks[loaded], spans.starts, spans.ends
    )


def medians_within(times: Ints, values: Floats, starts: Ints, ends: Ints) -> Floats:
    """Return the median of the values within each span, without its end; NaN for none.
    `times` are in order."""
    bounds = zip(
        np.searchsorted(times, starts).tolist(),
        np.searchsorted(times, ends).tolist(),
        strict=True,
    )
    return np.array(
        [
            np.median(values[first:after]) if after > first else np.nan
            for first, after in bounds
        ],
        float,
    )


def hosts_of(trace: Trace) -> npt.NDArray[np.str_]:
    """Return the host of each rank; empty where not recorded."""
    return np.array([trace.rank(rank).host or "" for rank in trace.ranks])


def centered_rows(
    values: Floats, groups: npt.NDArray[Any], of_pairs: Callable[..., Any]
) -> Floats:
    """Subtract in each column the median of the group's rows.

    Of two rows, subtract `of_pairs`; NaN in groups of one row.
    """
    result = np.full_like(values, np.nan)
    for group in np.unique(groups):
        rows = values[groups == group]
        recorded = ~np.isnan(rows)
        if len(rows) > 1 and recorded.any():
            columns = recorded.sum(axis=0) > 1
            center = of_pairs if len(rows) == 2 else np.nanmedian
            result[np.ix_(groups == group, columns)] = rows[:, columns] - center(
                rows[:, columns], axis=0
            )
    return result


def row_medians(rows: Floats) -> Floats:
    medians = np.full(len(rows), np.nan)
    recorded = ~np.isnan(rows).all(axis=1)
    medians[recorded] = np.nanmedian(rows[recorded], axis=1)
    return medians
