"""Measures memory and link use of each phase of each iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.iterations import IterationTable, PhaseArrays, intervals, steady_iterations, sums
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, both_busy, traffic
from ebbtide.analysis.metrics.memory_spans import in_read_iteration
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, peak_between
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@once_per_trace
def phase_peaks(trace: Trace, rank: int, pool: str) -> IterationTable:
    """Return the peak of a pool per iteration and phase, bytes; NaN where nothing was recorded."""
    times, sizes = memory_timeline(trace, rank, pool)
    phases = intervals(trace, rank, device_times=False).times_with_other
    read = in_read_iteration(trace, rank, pool, phases, times)
    return largest_by_part(phases, np.where(read, peak_between(times, sizes, phases.starts, phases.ends), np.nan))


def largest_by_part(phases: PhaseArrays, values: Floats) -> IterationTable:
    """Return the largest of the values of phases, per iteration and phase; NaN where there is none."""
    numbers, position = np.unique(phases.iterations, return_inverse=True)
    columns = {part: np.full(len(numbers), np.nan) for part in ITERATION_PARTS}
    for part, largest in columns.items():
        own = phases.phases == part
        np.fmax.at(largest, position[own], values[own])
    return IterationTable(numbers, columns)


@recent_per_trace
def link_table(trace: Trace, rank: int) -> pd.DataFrame:
    """Return a row per iteration, phase and direction.

    Columns iteration, phase, direction, length_ms, bytes, busy_ms (time in which copies ran), both_ms (time in which
    copies ran in both directions at once). NaN for figures that were not recorded, or too little of them.
    """
    return _link_rows(trace, rank, intervals(trace, rank).with_other)


def whole_link_table(trace: Trace, rank: int) -> pd.DataFrame:
    """Return a row per direction of the whole trace, with the columns of `link_table`; the phase is empty."""
    import pandas as pd

    span = trace.span_ns(rank)
    rows = [] if span is None else [(0, "", *span)]
    return _link_rows(trace, rank, pd.DataFrame(rows, columns=["iteration", "phase", "start_ns", "end_ns"]))


def _link_rows(trace: Trace, rank: int, phases: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `link_table` for some intervals: a table of iteration, phase, start_ns, end_ns."""
    import pandas as pd

    starts, ends = phases["start_ns"].to_numpy(np.int64), phases["end_ns"].to_numpy(np.int64)
    both = both_busy(trace, rank)
    both_ms = np.nan if both is None else both(starts, ends) / 1e6
    tables = []
    for direction in DIRECTIONS:
        moved = traffic(trace, rank, direction)
        busy = moved.busy if moved is not None else None
        figures = {
            "direction": direction,
            "length_ms": (ends - starts) / 1e6,
            "both_ms": both_ms,
            "bytes": np.nan if moved is None else moved.bytes(starts, ends),
            "busy_ms": np.nan if busy is None else busy(starts, ends) / 1e6,
        }
        tables.append(phases.assign(**figures))
    groups = pd.concat(tables).groupby(["iteration", "phase", "direction"], sort=False)
    figures = groups[["length_ms", "bytes", "busy_ms", "both_ms"]]
    # A sum exists only where each of its parts was recorded.
    return figures.sum().where(figures.count().eq(groups.size(), axis=0)).reset_index()


@once_per_trace
def phase_bytes(trace: Trace, rank: int, direction: str) -> IterationTable | None:
    """Return the bytes moved per iteration and phase: 0 for a phase that an iteration does not have, NaN where too
    little was sampled; None where neither copies nor counters were recorded."""
    moved = traffic(trace, rank, direction)
    if moved is None:
        return None
    phases = intervals(trace, rank).times_with_other
    sizes = moved.bytes(phases.starts, phases.ends)
    numbers, position = np.unique(phases.iterations, return_inverse=True)
    own = {part: phases.phases == part for part in ITERATION_PARTS}
    sizes_of = {part: sums(len(numbers), position[of_part], sizes[of_part]) for part, of_part in own.items()}
    return IterationTable(numbers, sizes_of)


def iteration_bytes(trace: Trace, direction: str) -> float | None:
    """Return the median of the bytes moved in a steady iteration, over iterations and ranks; None if not recorded."""
    numbers = steady_iterations(trace).numbers
    tables = [table for rank in trace.ranks if (table := phase_bytes(trace, rank, direction)) is not None]
    of_ranks = [np.sum([*table.only(numbers).columns.values()], axis=0) for table in tables]
    return median_or_none(np.concatenate(of_ranks)) if of_ranks else None
