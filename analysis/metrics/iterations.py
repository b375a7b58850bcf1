"""A trace cut into iterations and phases, and what memory and link did in each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.profiler.trace import Trace

PHASES = ("forward", "backward", "update", "other")


@dataclass(frozen=True)
class Intervals:
    """Where a rank's iterations and phases lie.

    spans: iteration, start_ns, end_ns; an iteration begins where the one before ended. phases: iteration,
    micro_step, phase, start_ns, end_ns, in order and without `other`. Both on device times where every phase has
    them, else on host times.
    """

    spans: pd.DataFrame
    phases: pd.DataFrame

    @cached_property
    def with_other(self) -> pd.DataFrame:
        """iteration, phase, start_ns, end_ns: the phases, and `other` wherever an iteration has none."""
        phases = self.phases[["iteration", "phase", "start_ns", "end_ns"]]
        if phases.empty:
            return phases
        starts = phases["start_ns"].to_numpy(np.int64)
        ends = np.append(self.spans["start_ns"].iloc[0], phases["end_ns"].to_numpy(np.int64))
        # Up to where something ran before each phase: iterations follow each other without a gap.
        reached = np.maximum.accumulate(ends)[:-1]
        gap = starts > reached
        iterations = phases["iteration"].to_numpy()[gap]
        other = {"iteration": iterations, "phase": "other", "start_ns": reached[gap], "end_ns": starts[gap]}
        return pd.concat([phases, pd.DataFrame(other)], ignore_index=True)


@once_per_trace
def intervals(trace: Trace, rank: int, device_times: bool = True) -> Intervals:
    """The finished iterations of a rank. device_times False: host times, by which memory lines are cut."""
    phases = trace.phases(rank)
    phases = phases[phases["iteration"].notna()]
    columns = ["iteration", "micro_step", "phase"]
    if device_times and len(phases) and phases["gpu_end_ns"].notna().all():
        times = phases[["gpu_start_ns", "gpu_end_ns"]]
    else:
        times = phases[["start_ns", "end_ns"]]
    frame = phases[columns].assign(
        iteration=phases["iteration"].astype("int64"),
        start_ns=times.iloc[:, 0].astype("int64"),
        end_ns=times.iloc[:, 1].astype("int64"),
    )
    frame = frame.sort_values("start_ns", kind="stable", ignore_index=True)
    ends = frame.groupby("iteration")["end_ns"].max()
    starts = np.roll(ends.to_numpy(np.int64), 1)
    if len(ends):
        begin = trace.rank(rank).get("first_iteration_start_ns")
        # Device clocks are placed to within microseconds: a first phase may seem to begin before its iteration.
        earliest = int(frame["start_ns"].min())
        starts[0] = earliest if begin is None else min(int(begin), earliest)
    spans = pd.DataFrame({"iteration": ends.index, "start_ns": starts, "end_ns": ends.to_numpy(np.int64)})
    return Intervals(spans.astype("int64"), frame)


@once_per_trace
def counted(trace: Trace) -> tuple[list[int], int]:
    """(the iterations that count, how many before them are warm-up): the first two are left out where there are five
    or more, unless the trace's meta says otherwise."""
    numbers = sorted({int(i) for rank in trace.ranks for i in trace.phases(rank)["iteration"].dropna().unique()})
    warmup = trace.meta.get("warmup_iterations")
    if warmup is None:
        warmup = 2 if len(numbers) >= 5 else 0
    return numbers[warmup:], int(warmup)


def durations_ms(cut: Intervals) -> pd.DataFrame:
    """Milliseconds per iteration (index) and phase (columns of PHASES and `iteration`); NaN for a phase that no
    iteration has."""
    length = (cut.phases["end_ns"] - cut.phases["start_ns"]) / 1e6
    by_phase = length.groupby([cut.phases["iteration"], cut.phases["phase"]]).sum().unstack(fill_value=0.0)
    table = by_phase.reindex(index=cut.spans["iteration"], fill_value=0.0).reindex(columns=list(PHASES[:3]))
    table["iteration"] = ((cut.spans["end_ns"] - cut.spans["start_ns"]) / 1e6).to_numpy()
    table["other"] = (table["iteration"] - table[list(PHASES[:3])].sum(axis=1)).clip(lower=0.0)
    return table


@once_per_trace
def slowest_times(trace: Trace) -> pd.DataFrame:
    """Milliseconds of the slowest rank, per counted iteration (index) and phase (columns of PHASES and `iteration`)."""
    tables = [durations_ms(intervals(trace, rank)) for rank in trace.ranks]
    if not tables:
        return pd.DataFrame(columns=["iteration", *PHASES], dtype=float)
    slowest = pd.concat(tables).groupby(level=0).max()
    return slowest[slowest.index.isin(counted(trace)[0])]


@once_per_trace
def median_ms(trace: Trace, phase: str) -> float | None:
    """The median over the counted iterations of `slowest_times` of a phase (or `iteration`); None where it was not
    recorded."""
    times = slowest_times(trace)[phase].dropna()
    return float(times.median()) if len(times) else None
