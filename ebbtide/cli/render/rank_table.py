"""Prints a row per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.rank_differences import print_differences
from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.ranks.by_rank import RankTable
    from ebbtide.profiler.trace import Trace


def print_ranks(trace: Trace, table: RankTable) -> None:
    """Print the medians of each rank, those that differ first, and how those differ."""
    from ebbtide.analysis.metrics.missing import no_iterations

    if not table.counted:
        echo(f"{trace.path}: {no_iterations(trace)}")
        return
    ranks = sorted(table.ranks, key=lambda row: (row.cause is None, -(row.phases_ms or 0.0)))
    rows = [
        [
            str(row.rank),
            ms_text(row.forward_ms),
            ms_text(row.backward_ms),
            ms_text(row.update_ms),
            ms_text(row.other_ms),
            rate_text(row.h2d_bytes_per_s),
            rate_text(row.d2h_bytes_per_s),
            bytes_text(None if row.free_bytes is None else round(row.free_bytes)),
            "-" if row.times_slowest is None else f"{row.times_slowest:,}",
            row.cause or "",
        ]
        for row in ranks
    ]
    columns = ["rank", "forward", "backward", "update", "other", "h2d", "d2h", "least free", "slowest", "differs by"]
    print_table(f"{trace.path}: medians of {len(rows)} ranks over {table.counted} iterations", columns, rows[:MAX_ROWS])
    print_omitted(len(rows))
    print_differences(table.differences)
