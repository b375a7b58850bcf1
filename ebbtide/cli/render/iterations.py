"""Prints the variation between iterations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.iteration_stats import Iterations
    from ebbtide.profiler.trace import Trace


def print_iterations(trace: Trace, iterations: Iterations) -> None:
    """Print the variation of each phase over the iterations, outliers, and the slowest rank."""
    from ebbtide.analysis.metrics.missing import no_iterations

    if not iterations.counted:
        echo(f"{trace.path}: {no_iterations(trace)}")
        return
    left_out = f", iterations {', '.join(map(str, iterations.warmup))} left out as warm-up" if iterations.warmup else ""
    echo(f"{trace.path}: {iterations.counted} iterations counted{left_out}")
    if not iterations.rows:
        echo("no finished iteration of this rank was recorded")
    rows = [
        [
            spread.phase,
            ms_text(spread.median_ms),
            ms_text(spread.spread_ms),
            ms_text(spread.min_ms),
            ms_text(spread.max_ms),
            ", ".join(map(str, spread.outliers[:8])) + (", …" if len(spread.outliers) > 8 else "") or "none",
        ]
        for spread in iterations.spreads
    ]
    if rows:
        columns = ["phase", "median", "spread", "min", "max", "outliers"]
        print_table("Time over the iterations (spread: scaled median absolute deviation)", columns, rows[:MAX_ROWS])
        print_omitted(len(rows))
    if iterations.slowest_rank and sum(iterations.slowest_rank.values()):
        rank, count = max(iterations.slowest_rank.items(), key=lambda item: item[1])
        echo(f"most often the slowest: rank {rank}, in {count} of {iterations.counted} iterations")
