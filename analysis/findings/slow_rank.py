"""Finds a rank that the other ranks wait for."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import PHASES
from ebbtide.units import ms_text

# A rank that is slowest in at least this share of the iterations is not so by chance.
_MIN_SLOWEST_SHARE = 0.8
_MIN_SLOWER = 0.02
_MIN_ITERATIONS = 3


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the phase times of the rank that is slowest most often with those of the median other rank."""
    stats = compare_iterations(metrics.trace)
    if not stats.slowest_rank or stats.counted < _MIN_ITERATIONS:
        return None
    rank, count = max(stats.slowest_rank.items(), key=lambda item: item[1])
    busy = {r: sum(s.median_ms for s in stats.spreads if s.rank == r and s.phase in PHASES) for r in stats.slowest_rank}
    others = sorted(ms for r, ms in busy.items() if r != rank)
    usual = others[len(others) // 2]
    gain = busy[rank] - usual
    if count < _MIN_SLOWEST_SHARE * stats.counted or not usual or gain < _MIN_SLOWER * usual:
        return None
    return Finding(
        "slow-rank",
        f"Rank {rank} is slower than the others",
        clamp_gain(gain),
        (
            f"rank {rank} is the slowest in {count} of {stats.counted} iterations",
            f"its phases take {ms_text(busy[rank])}, those of the median other rank {ms_text(usual)}",
        ),
        "look at that rank's clocks, temperature, link width, CPU binding and share of the work",
    )
