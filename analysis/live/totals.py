"""Counters of a rank since its recording began."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.iterations import durations_ms, intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, traffic
from ebbtide.phases import OTHER, PHASES
from ebbtide.profiler.live.process_tail import PhaseCounts
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class RankTotals:
    """Sums over all finished iterations of a rank, the warm-up included.

    Attributes:
        iterations: Number of finished iterations.
        iteration_s: Their time in seconds.
        phase_s: Phase, or `other` -> its seconds; a phase that no iteration has is missing.
        phase_iterations: Phase, or `other` -> the number of iterations that have it.
        link_bytes: `h2d` or `d2h` -> bytes moved since the recording began; None where they were not recorded.
    """

    iterations: int
    iteration_s: float
    phase_s: dict[str, float]
    phase_iterations: dict[str, int]
    link_bytes: dict[str, int | None]


def totals_of_counts(counts: PhaseCounts, link_bytes: dict[str, int] | None) -> RankTotals:
    """Return the totals of a recording that runs, from what was counted while it was followed."""
    phase_s = {phase: counts.phase_ns[phase] / 1e9 for phase in PHASES if counts.phase_iterations[phase]}
    iteration_s = counts.iteration_ns / 1e9
    moved = link_bytes or {}
    return _totals(
        counts.iterations, iteration_s, phase_s, counts.phase_iterations, {d: moved.get(d) for d in DIRECTIONS}
    )


def totals_of_trace(trace: Trace, rank: int) -> RankTotals:
    """Return the totals of a trace from its tables."""
    times = intervals(trace, rank)
    table = durations_ms(times)
    runs = times.phases.groupby("phase")["iteration"].nunique()
    phase_s = {phase: float(table[phase].sum()) / 1e3 for phase in PHASES if phase in runs}
    of_host = intervals(trace, rank, device_times=False).spans
    seconds = 0.0 if of_host.empty else float(of_host["end_ns"].iloc[-1] - of_host["start_ns"].iloc[0]) / 1e9
    numbers = {phase: int(runs[phase]) for phase in phase_s}
    return _totals(len(table), seconds, phase_s, numbers, {d: _moved(trace, rank, d) for d in DIRECTIONS})


def _totals(
    iterations: int,
    iteration_s: float,
    phase_s: dict[str, float],
    phase_iterations: dict[str, int],
    link_bytes: dict[str, int | None],
) -> RankTotals:
    """Return totals with `other`: the time of iterations in which no phase ran."""
    numbers = {phase: phase_iterations[phase] for phase in phase_s}
    if iterations:
        phase_s = {**phase_s, OTHER: max(0.0, iteration_s - sum(phase_s.values()))}
        numbers[OTHER] = iterations
    return RankTotals(iterations, iteration_s, phase_s, numbers, link_bytes)


def _moved(trace: Trace, rank: int, direction: str) -> int | None:
    moved, span = traffic(trace, rank, direction), trace.span_ns(rank)
    if moved is None or span is None:
        return None
    start, end = (float(moved.total(np.array([time], np.int64))[0]) for time in span)
    return None if np.isnan(end - start) else round(end - start)
