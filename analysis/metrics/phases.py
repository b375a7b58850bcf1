"""Measures memory and link use of each phase of each iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.iterations import (
    IterationTable,
    PhaseArrays,
    exact_sums,
    intervals,
    steady_iterations,
    sums,
)
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, both_busy, traffic
from ebbtide.analysis.metrics.memory_spans import in_read_iteration
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, peak_between
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@once_per_trace
def phase_peaks(trace: Trace, rank: int, pool: str) -> IterationTable:
    """Return the peak of a pool per iteration and phase, bytes; NaN where nothing was
    recorded."""
    times, sizes = memory_timeline(trace, rank, pool)
    phases = intervals(trace, rank, device_times=False).times_with_other
    read = in_read_iteration(trace, rank, pool, phases, times)
    return largest_by_part(
        phases,
        np.where(read, peak_between(times, sizes, phases.starts, phases.ends), np.nan),
    )


def largest_by_part(phases: PhaseArrays, values: Floats) -> IterationTable:
    """Return the largest value of phases, per iteration and phase; NaN where there is
    none."""
    numbers, position = np.unique(phases.iterations, return_inverse=True)
    columns = {part: np.full(len(numbers), np.nan) for part in ITERATION_PARTS}
    for part, largest in columns.items():
        own = phases.phases == part
        np.fmax.at(largest, position[own], values[own])
    return IterationTable(numbers, columns)


@dataclass(frozen=True)
class LinkTable:
    """Link use, an entry per iteration, phase and direction.

    NaN stands for figures that were recorded too little or not at all. Columns
    length_ms, bytes, busy_ms (copies ran), both_ms (copies ran in both directions at
    once).
    """

    iterations: Ints
    phases: npt.NDArray[np.object_]  # Empty text for the whole trace.
    directions: npt.NDArray[np.object_]
    columns: Mapping[str, Floats]

    @property
    def frame(self) -> pd.DataFrame:
        """A pandas frame with all columns."""
        import pandas as pd

        keys = {
            "iteration": self.iterations,
            "phase": self.phases,
            "direction": self.directions,
        }
        return pd.DataFrame({**keys, **self.columns})

    def of_phases(self) -> Iterator[tuple[str, str, dict[str, Floats]]]:
        """Yield each phase and direction with its columns."""
        for phase in ("", *ITERATION_PARTS):
            for direction in DIRECTIONS:
                own = (self.phases == phase) & (self.directions == direction)
                if own.any():
                    yield (
                        phase,
                        direction,
                        {name: values[own] for name, values in self.columns.items()},
                    )


def link_table(
    trace: Trace, rank: int, iterations: Sequence[int] | None = None
) -> LinkTable:
    """Return the link use of a rank in some iterations, or in all if None."""
    phases = intervals(trace, rank).times_with_other
    return _link_use(
        trace,
        rank,
        phases
        if iterations is None
        else phases.only(np.isin(phases.iterations, iterations)),
    )


def whole_link_table(trace: Trace, rank: int) -> LinkTable:
    """Return the link use of a rank in the whole trace."""
    span = trace.span_ns(rank)
    starts, ends = (
        np.array([] if span is None else [time], np.int64) for time in span or (0, 0)
    )
    return _link_use(
        trace,
        rank,
        PhaseArrays(
            np.zeros_like(starts), np.full(len(starts), "", object), starts, ends
        ),
    )


def _link_use(trace: Trace, rank: int, phases: PhaseArrays) -> LinkTable:
    starts, ends = phases.starts, phases.ends
    both, parts = both_busy(trace, rank), ("", *ITERATION_PARTS)
    numbers, position = np.unique(phases.iterations, return_inverse=True)
    code = np.select([phases.phases == part for part in parts], range(len(parts)))
    groups, row = np.unique(position * len(parts) + code, return_inverse=True)
    unknown = np.full(len(starts), np.nan)
    columns: dict[str, list[Floats]] = {}
    for direction in DIRECTIONS:
        moved = traffic(trace, rank, direction)
        figures = {
            "length_ms": (ends - starts) / 1e6,
            "bytes": unknown if moved is None else moved.bytes(starts, ends),
            "busy_ms": unknown
            if moved is None or moved.busy is None
            else moved.busy(starts, ends) / 1e6,
            "both_ms": unknown if both is None else both(starts, ends) / 1e6,
        }
        for name, values in figures.items():
            # A sum exists only where each of its parts was recorded.
            columns.setdefault(name, []).append(exact_sums(len(groups), row, values))
    return LinkTable(
        np.tile(numbers[groups // len(parts)], 2),
        np.tile(np.array(parts, object)[groups % len(parts)], 2),
        np.repeat(np.array(DIRECTIONS, object), len(groups)),
        {name: np.concatenate(values) for name, values in columns.items()},
    )


@once_per_trace
def phase_bytes(trace: Trace, rank: int, direction: str) -> IterationTable | None:
    """Return the bytes moved per iteration and phase; None where neither copies nor
    counters were recorded.

    A phase that an iteration does not have has 0, one with too few samples NaN."""
    moved = traffic(trace, rank, direction)
    if moved is None:
        return None
    phases = intervals(trace, rank).times_with_other
    sizes = moved.bytes(phases.starts, phases.ends)
    numbers, position = np.unique(phases.iterations, return_inverse=True)
    own = {part: phases.phases == part for part in ITERATION_PARTS}
    sizes_of = {
        part: sums(len(numbers), position[of_part], sizes[of_part])
        for part, of_part in own.items()
    }
    return IterationTable(numbers, sizes_of)


def iteration_bytes(trace: Trace, direction: str) -> float | None:
    """Return the median over ranks and steady iterations of the bytes moved in an
    iteration; None if not recorded."""
    numbers = steady_iterations(trace).numbers
    tables = [
        table
        for rank in trace.ranks
        if (table := phase_bytes(trace, rank, direction)) is not None
    ]
    of_ranks = [
        np.sum([*table.only(numbers).columns.values()], axis=0) for table in tables
    ]
    return median_or_none(np.concatenate(of_ranks)) if of_ranks else None
