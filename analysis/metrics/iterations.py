"""Splits a trace into iterations and phases, measures their times, and puts the trace
on the clock of its GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS, OTHER, PHASES
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools, Columns

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class IterationTable:
    """A row per iteration, a column per phase or quantity."""

    numbers: Ints  # The iterations, ascending.
    # Values by name, one per iteration; NaN where not known.
    columns: Mapping[str, Floats]

    @property
    def frame(self) -> pd.DataFrame:
        """A pandas frame with the iterations as index."""
        import pandas as pd

        return pd.DataFrame(
            dict(self.columns), index=pd.Index(self.numbers, name="iteration")
        )

    def at(self, numbers: Sequence[int] | Ints) -> IterationTable:
        """Return the rows of some iterations, ascending.

        Rows are NaN for iterations that the table does not have.
        """
        wanted = np.asarray(numbers, np.int64)
        position, present = positions(self.numbers, wanted)
        columns = {name: np.full(len(wanted), np.nan) for name in self.columns}
        for name, values in columns.items():
            values[present] = self.columns[name][position[present]]
        return IterationTable(wanted, columns)

    def only(self, numbers: Sequence[int]) -> IterationTable:
        """Return the rows of some iterations, ascending.

        Iterations that the table does not have are left out.
        """
        _, kept = positions(np.asarray(numbers, np.int64), self.numbers)
        return IterationTable(
            self.numbers[kept],
            {name: values[kept] for name, values in self.columns.items()},
        )

    def largest(self, names: Sequence[str]) -> Floats:
        """Return the largest value of some columns in each iteration; NaN where none is
        known."""
        largest: Floats = np.fmax.reduce([self.columns[name] for name in names])
        return largest

    def total(self, names: Sequence[str]) -> Floats:
        """Return the sum of the known values of some columns in each iteration; 0 where
        none is known."""
        total: Floats = np.sum(
            [np.nan_to_num(self.columns[name]) for name in names], axis=0
        )
        return total


def positions(numbers: Ints, wanted: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the position of each wanted number among ascending ones.

    Return also whether it is one of them.
    """
    position = np.minimum(np.searchsorted(numbers, wanted), max(len(numbers) - 1, 0))
    present = (
        numbers[position] == wanted if len(numbers) else np.zeros(len(wanted), bool)
    )
    return position, present


def sums(count: int, rows: Ints, values: Floats) -> Floats:
    """Return the sum of the values of each of `count` rows; 0 where there is none."""
    return np.bincount(rows, values, count).astype(np.float64)


def exact_sums(count: int, rows: Ints, values: Floats) -> Floats:
    """Return `sums` without errors of rounding in between; NaN where a value is."""
    totals = np.zeros(count, np.longdouble)
    np.add.at(totals, rows, values)
    return totals.astype(np.float64)


# Where a trace does not state its warm-up: the first iterations, of traces with at
# least this many.
_WARMUP_ITERATIONS = 2
_MIN_ITERATIONS_FOR_WARMUP = 5


class PhaseArrays(NamedTuple):
    """Phases of finished iterations as arrays, an entry each, in order of time."""

    iterations: Ints
    phases: npt.NDArray[np.object_]
    starts: Ints  # ns
    ends: Ints  # ns

    def only(self, selected: Bools | Ints) -> PhaseArrays:
        return PhaseArrays(
            self.iterations[selected],
            self.phases[selected],
            self.starts[selected],
            self.ends[selected],
        )


@dataclass(frozen=True)
class Intervals:
    """Times of a rank's iterations and phases, by the device's clock where every phase
    has device times, else the host's."""

    numbers: Ints  # The iterations, ascending.
    starts: Ints  # Their starts, ns. An iteration begins where the one before ended.
    # Their ends, ns: of the last phase, or, where the source marks iterations, the
    # mark.
    ends: Ints
    times: PhaseArrays  # The phases, without `other`.
    micro_steps: Ints  # The micro-step of each phase.

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Table of iteration, start_ns, end_ns."""
        import pandas as pd

        return pd.DataFrame(
            {"iteration": self.numbers, "start_ns": self.starts, "end_ns": self.ends}
        )

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Table of phases, in order of time and without `other`.

        Its columns are iteration, micro_step, phase, start_ns and end_ns.
        """
        frame = _frame(self.times)
        frame.insert(1, "micro_step", self.micro_steps)
        return frame

    @cached_property
    def with_other(self) -> pd.DataFrame:
        """Table of iteration, phase, start_ns, end_ns, with `other`.

        Time without a phase is `other`.
        """
        return _frame(self.times_with_other)

    @cached_property
    def times_with_other(self) -> PhaseArrays:
        """The phases, and after them `other` for the time without a phase."""
        phases = self.times
        if not len(self.ends):
            return phases
        # At the end of each iteration stands a phase without length, so that the time
        # before it is a gap, too.
        starts = np.concatenate([self.ends, phases.starts])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.concatenate([self.ends, phases.ends])[order]
        # The latest end before each phase: iterations follow each other without a gap.
        reached = np.maximum.accumulate(np.append(self.starts[0], ends))[:-1]
        gap = starts > reached
        iterations = np.concatenate([self.numbers, phases.iterations])[order][gap]
        other = PhaseArrays(
            iterations,
            np.full(len(iterations), OTHER, object),
            reached[gap],
            starts[gap],
        )
        return PhaseArrays(
            *(np.concatenate(arrays) for arrays in zip(phases, other, strict=True))
        )


def _frame(times: PhaseArrays) -> pd.DataFrame:
    import pandas as pd

    columns = {
        "iteration": times.iterations,
        "phase": times.phases,
        "start_ns": times.starts,
        "end_ns": times.ends,
    }
    return pd.DataFrame(columns).astype({"phase": "str"})


@recent_per_trace
def intervals(trace: Trace, rank: int, device_times: bool = True) -> Intervals:
    """Split the finished iterations of a rank into phases."""
    rows = trace.columns(rank, "phases")
    finished = rows.recorded("iteration")
    marks = trace.columns(rank, "iteration_marks")
    if not finished.any() and len(marks):
        # The source marks iterations, and has no phases.
        none = np.empty(0, np.int64)
        phases = PhaseArrays(none, np.empty(0, object), none, none)
        return Intervals(
            marks.ints("iteration"),
            marks.ints("start_ns"),
            marks.ints("end_ns"),
            phases,
            none,
        )
    start, end = (
        ("gpu_start_ns", "gpu_end_ns") if device_times else ("start_ns", "end_ns")
    )
    if device_times and not (
        finished.any() and (rows.recorded(start) & rows.recorded(end))[finished].all()
    ):
        return intervals(trace, rank, device_times=False)
    order = np.flatnonzero(finished)
    order = order[np.argsort(rows.ints(start)[order], kind="stable")]
    iterations, starts, ends = (
        rows.ints(name)[order] for name in ("iteration", start, end)
    )
    times = PhaseArrays(iterations, rows.texts("phase")[order], starts, ends)
    numbers, iteration_ends = _iteration_ends(times, marks, end)
    iteration_starts = np.roll(iteration_ends, 1)
    if len(numbers):
        begin = trace.rank(rank).first_iteration_start_ns
        # Device clocks are aligned to within microseconds: a first phase may seem to
        # begin before its iteration.
        iteration_starts[0] = starts[0] if begin is None else min(begin, int(starts[0]))
    return Intervals(
        numbers, iteration_starts, iteration_ends, times, rows.ints("micro_step")[order]
    )


def _iteration_ends(
    times: PhaseArrays, marks: Columns, column: str
) -> tuple[Ints, Ints]:
    """Return the iterations and where each ends: with its last phase, or with its mark
    if later, before the next iteration.

    `column` is the column of `marks` on the clock of the phases."""
    numbers, first, position = np.unique(
        times.iterations, return_index=True, return_inverse=True
    )
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    ends = np.full(len(numbers), least)
    np.maximum.at(ends, position, times.ends)
    if not len(marks):
        return numbers, ends
    next_starts = np.append(times.starts[first][1:], most)
    marked, (of_mark, present) = (
        np.full(len(numbers), least),
        positions(numbers, marks.ints("iteration")),
    )
    present &= marks.recorded(column)
    marked[of_mark[present]] = marks.ints(column)[present]
    return numbers, np.maximum(ends, np.minimum(marked, next_starts))


@once_per_trace
def part_counts(trace: Trace, rank: int) -> dict[str, int]:
    """Return how often each part of ITERATION_PARTS ran in a rank's iterations.

    Only finished ones count, and each micro-step once.
    """
    times = intervals(trace, rank)
    ran = {
        *zip(times.times.phases, times.times.iterations, times.micro_steps, strict=True)
    }
    counts = Counter(phase for phase, *_ in ran)
    return {OTHER: len(times.numbers), **{phase: counts[phase] for phase in PHASES}}


class SteadyIterations(NamedTuple):
    """Iterations of a trace without its warm-up."""

    numbers: list[int]  # The iterations that medians are over, ascending.
    warmup: int  # How many iterations before them are left out.


@once_per_trace
def steady_iterations(trace: Trace) -> SteadyIterations:
    """Return the iterations without the warm-up.

    The warm-up is as the metadata states it, else the first two of five or more.
    """
    numbers = sorted(
        {number for rank in trace.ranks for number in _finished(trace, rank)}
    )
    warmup = trace.meta.warmup_iterations
    if warmup is None:
        warmup = _WARMUP_ITERATIONS if len(numbers) >= _MIN_ITERATIONS_FOR_WARMUP else 0
    warmup = min(warmup, len(numbers))
    return SteadyIterations(numbers[warmup:], warmup)


def _finished(trace: Trace, rank: int) -> list[int]:
    phases = trace.columns(rank, "phases")
    finished = phases.ints("iteration")[phases.recorded("iteration")]
    if not len(finished):
        finished = trace.columns(rank, "iteration_marks").ints("iteration")
    numbers: list[int] = np.unique(finished).tolist()
    return numbers


def durations_ms(times: Intervals) -> IterationTable:
    """Return milliseconds per iteration and part (also `iteration`); NaN for a phase
    that no iteration has."""
    position = np.searchsorted(times.numbers, times.times.iterations)
    lengths = (times.times.ends - times.times.starts) / 1e6
    columns, absent = {}, np.full(len(times.numbers), np.nan)
    for phase in PHASES:
        own = times.times.phases == phase
        columns[phase] = (
            sums(len(absent), position[own], lengths[own]) if own.any() else absent
        )
    iteration_ms = (times.ends - times.starts) / 1e6
    other_ms = np.maximum(
        iteration_ms - IterationTable(times.numbers, columns).total(PHASES), 0.0
    )
    if not len(times.times.starts):
        other_ms = absent  # nothing is known of phases
    return IterationTable(
        times.numbers, {**columns, "iteration": iteration_ms, OTHER: other_ms}
    )


@once_per_trace
def rank_durations(trace: Trace, rank: int) -> IterationTable:
    table = durations_ms(intervals(trace, rank))
    if trace.rank(rank).gaps_recorded:
        return table
    not_known = np.full(len(table.numbers), np.nan)
    return IterationTable(table.numbers, {**table.columns, OTHER: not_known})


@once_per_trace
def slowest_times(trace: Trace) -> IterationTable:
    """Return milliseconds of the slowest rank per steady iteration, with the columns of
    `durations_ms`."""
    tables = [rank_durations(trace, rank) for rank in trace.ranks]
    ran = np.unique(
        np.concatenate([np.empty(0, np.int64), *(table.numbers for table in tables)])
    )
    numbers = ran[np.isin(ran, steady_iterations(trace).numbers)]
    of_ranks = [table.at(numbers) for table in tables]
    parts = ("iteration", *ITERATION_PARTS)
    none = np.full(len(numbers), np.nan)
    return IterationTable(
        numbers,
        {
            part: np.fmax.reduce([none, *(table.columns[part] for table in of_ranks)])
            for part in parts
        },
    )


@once_per_trace
def median_ms(trace: Trace, phase: str) -> float | None:
    """Return the median of `slowest_times` of a phase, `other` or `iteration`.

    Return None where it was not recorded.
    """
    return median_or_none(slowest_times(trace).columns[phase])


# Columns of times of the host.
_CLOCK_TIMES = {
    "phases": ("start_ns", "end_ns"),
    "iteration_marks": ("start_ns", "end_ns"),
    "memory": ("t_ns",),
    "allocations": ("start_ns", "end_ns"),
    "annotations": ("start_ns", "end_ns"),
    "marks": ("start_ns", "end_ns"),
}


def on_device_clock(trace: Trace) -> Trace:
    """Return the trace with phases and memory at the times of the GPU.

    A time of the host within a phase becomes the same position in that phase on the
    GPU. Ranks whose phases have no times of the GPU stay as they are.
    """
    clocks = {
        rank: clock
        for rank in trace.ranks
        if (clock := _clock(trace, rank)) is not None
    }

    def load(rank: int, name: str) -> Columns:
        if rank not in clocks or name not in _CLOCK_TIMES:
            return trace.columns(rank, name)
        rows = trace.table(rank, name)
        for key in _CLOCK_TIMES[name]:
            times, has_time = rows[key].copy(), rows[key].notna()
            times[has_time] = clocks[rank](times[has_time].to_numpy(np.int64))
            rows = rows.assign(**{key: times})
        return Columns(name, rows)

    return Trace(trace.path, trace.raw_meta, load, trace.labels) if clocks else trace


def _clock(trace: Trace, rank: int) -> Callable[[Ints], Ints] | None:
    """Return the function from times of the host to times of the GPU.

    Return None where they are not known.
    """
    host, device = (
        intervals(trace, rank, device_times).times for device_times in (False, True)
    )
    if not len(host.starts) or np.array_equal(host.starts, device.starts):
        return None
    before, after = (
        np.stack([times.starts, times.ends], axis=1).ravel() for times in (host, device)
    )
    before, after = _with_marks(trace, rank, before, after)
    ahead = np.maximum.accumulate(after) - before
    return lambda at: at + np.rint(np.interp(at, before, ahead)).astype(np.int64)


def _with_marks(
    trace: Trace, rank: int, before: Ints, after: Ints
) -> tuple[Ints, Ints]:
    """Return times of the host and of the GPU, also at the marks of the job."""
    rows = trace.columns(rank, "marks")
    own = rows.recorded("gpu_start_ns") & rows.recorded("gpu_end_ns")
    host, device = (
        np.concatenate([rows.ints(name)[own] for name in names])
        for names in (("start_ns", "end_ns"), ("gpu_start_ns", "gpu_end_ns"))
    )
    before, after = np.concatenate([before, host]), np.concatenate([after, device])
    order = np.argsort(before, kind="stable")
    return before[order], after[order]
