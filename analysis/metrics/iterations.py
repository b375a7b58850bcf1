"""Splits a trace into iterations and phases, and measures their times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.phases import ITERATION_PARTS, OTHER, PHASES
from ebbtide.profiler.trace import Trace

# Where a trace does not state its warm-up: the first iterations, of traces with at least so many.
_WARMUP_ITERATIONS = 2
_MIN_ITERATIONS_FOR_WARMUP = 5


@dataclass(frozen=True)
class Intervals:
    """Times of a rank's iterations and phases, on the device's clock where every phase has device times, else on the
    host's.
    """

    # Table of iteration, start_ns, end_ns. An iteration begins where the one before ended. It ends with its last phase,
    # or, where the source marks iterations, at the mark.
    spans: pd.DataFrame
    # Table of iteration, micro_step, phase, start_ns, end_ns, in order of time and without `other`.
    phases: pd.DataFrame

    @cached_property
    def with_other(self) -> pd.DataFrame:
        """Table of iteration, phase, start_ns, end_ns: the phases, and `other` for the time without a phase."""
        phases = self.phases[["iteration", "phase", "start_ns", "end_ns"]]
        if phases.empty:
            return phases
        # At the end of each iteration stands a phase without length, so that the time before it is a gap, too.
        marks = self.spans[["iteration", "end_ns"]].assign(start_ns=self.spans["end_ns"])
        rows = pd.concat([marks, phases]).sort_values("start_ns", kind="stable")
        starts = rows["start_ns"].to_numpy(np.int64)
        ends = np.append(self.spans["start_ns"].iloc[0], rows["end_ns"].to_numpy(np.int64))
        # The latest end before each phase: iterations follow each other without a gap.
        reached = np.maximum.accumulate(ends)[:-1]
        gap = starts > reached
        iterations = rows["iteration"].to_numpy()[gap]
        other = {"iteration": iterations, "phase": OTHER, "start_ns": reached[gap], "end_ns": starts[gap]}
        return pd.concat([phases, pd.DataFrame(other)], ignore_index=True)


@recent_per_trace
def intervals(trace: Trace, rank: int, device_times: bool = True) -> Intervals:
    """Split the finished iterations of a rank into phases."""
    phases = trace.phases(rank)
    phases = phases[phases["iteration"].notna()]
    columns = ["iteration", "micro_step", "phase"]
    if device_times and (phases.empty or phases["gpu_end_ns"].isna().any()):
        return intervals(trace, rank, device_times=False)
    times = phases[["gpu_start_ns", "gpu_end_ns"] if device_times else ["start_ns", "end_ns"]]
    frame = phases[columns].assign(
        iteration=phases["iteration"].astype("int64"),
        start_ns=times.iloc[:, 0].astype("int64"),
        end_ns=times.iloc[:, 1].astype("int64"),
    )
    frame = frame.sort_values("start_ns", kind="stable", ignore_index=True)
    ends = _iteration_ends(frame, trace.iteration_marks(rank), str(times.columns[1]))
    starts = np.roll(ends.to_numpy(np.int64), 1)
    if len(ends):
        begin = trace.rank(rank).first_iteration_start_ns
        # Device clocks are aligned to within microseconds: a first phase may seem to begin before its iteration.
        earliest = int(frame["start_ns"].min())
        starts[0] = earliest if begin is None else min(begin, earliest)
    spans = pd.DataFrame({"iteration": ends.index, "start_ns": starts, "end_ns": ends.to_numpy(np.int64)})
    return Intervals(spans.astype("int64"), frame)


def _iteration_ends(phases: pd.DataFrame, marks: pd.DataFrame, column: str) -> pd.Series[int]:
    """Return the end of each iteration: of its last phase, or the later end of its mark, before the next iteration.

    Args:
        phases: Phases of finished iterations, in order of time.
        marks: The table `iteration_marks`.
        column: The column of `marks` on the clock of the phases.
    """
    by_iteration = phases.groupby("iteration")
    ends = by_iteration["end_ns"].max()
    if marks.empty:
        return ends
    next_starts = by_iteration["start_ns"].min().shift(-1, fill_value=np.iinfo(np.int64).max)
    marked = marks.set_index("iteration")[column].reindex(ends.index).fillna(np.iinfo(np.int64).min).astype("int64")
    return np.maximum(ends, np.minimum(marked, next_starts))


@once_per_trace
def part_counts(trace: Trace, rank: int) -> dict[str, int]:
    """Return how often each part of ITERATION_PARTS ran in the finished iterations of a rank, each micro-step once."""
    times = intervals(trace, rank)
    ran = times.phases[["iteration", "micro_step", "phase"]].drop_duplicates()["phase"].value_counts()
    return {OTHER: len(times.spans), **{phase: int(ran.get(phase, 0)) for phase in PHASES}}


class SteadyIterations(NamedTuple):
    """Iterations of a trace without its warm-up."""

    numbers: list[int]  # The iterations that medians are over, ascending.
    warmup: int  # How many iterations before them are left out.


@once_per_trace
def steady_iterations(trace: Trace) -> SteadyIterations:
    """Return the iterations of all ranks without the warm-up.

    The first two are warm-up where there are five or more, unless the trace's metadata states another number.
    """
    numbers = sorted({int(i) for rank in trace.ranks for i in trace.phases(rank)["iteration"].dropna().unique()})
    warmup = trace.meta.warmup_iterations
    if warmup is None:
        warmup = _WARMUP_ITERATIONS if len(numbers) >= _MIN_ITERATIONS_FOR_WARMUP else 0
    warmup = min(warmup, len(numbers))
    return SteadyIterations(numbers[warmup:], warmup)


def durations_ms(times: Intervals) -> pd.DataFrame:
    """Return milliseconds per iteration (index) and part (columns `iteration` and ITERATION_PARTS).

    NaN for a phase that no iteration has.
    """
    length = (times.phases["end_ns"] - times.phases["start_ns"]) / 1e6
    by_phase = length.groupby([times.phases["iteration"], times.phases["phase"]]).sum().unstack(fill_value=0.0)
    table = by_phase.reindex(index=times.spans["iteration"], fill_value=0.0).reindex(columns=list(PHASES))
    table["iteration"] = ((times.spans["end_ns"] - times.spans["start_ns"]) / 1e6).to_numpy()
    table[OTHER] = (table["iteration"] - table[list(PHASES)].sum(axis=1)).clip(lower=0.0)
    return table


@once_per_trace
def rank_durations(trace: Trace, rank: int) -> pd.DataFrame:
    """Return `durations_ms` of the finished iterations of a rank."""
    return durations_ms(intervals(trace, rank))


@once_per_trace
def slowest_times(trace: Trace) -> pd.DataFrame:
    """Return milliseconds of the slowest rank per steady iteration (index) and part (columns `iteration` and
    ITERATION_PARTS)."""
    tables = [rank_durations(trace, rank) for rank in trace.ranks]
    if not tables:
        return pd.DataFrame(columns=["iteration", *ITERATION_PARTS], dtype=float)
    slowest = pd.concat(tables).groupby(level=0).max()
    return slowest[slowest.index.isin(steady_iterations(trace).numbers)]


@once_per_trace
def median_ms(trace: Trace, phase: str) -> float | None:
    """Return the median of `slowest_times` of a phase, `other` or `iteration`; None where it was not recorded."""
    return median_or_none(slowest_times(trace)[phase])
