"""The tables of ranks: those that differ, and all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.analysis.metrics.devices import peak_pool, pool_peaks
from ebbtide.analysis.metrics.missing import no_iterations
from ebbtide.analysis.metrics.ranks.comparison import RankDifferences
from ebbtide.analysis.tables.table import (
    Table,
    View,
    free_note,
    ms,
    number,
    rate,
    size,
    text,
)
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.units import runs_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.ranks.by_rank import RankTable

_SOURCE = "ebbtide summary --by rank --json"


def differences_table(differences: RankDifferences) -> Table:
    """Return the table of the ranks and hosts that differ."""
    columns = (
        text("rank or host", "name"),
        text(
            "ranks of the host",
            lambda row: runs_text(row.ranks) if row.is_host else None,
        ),
        text("on host", lambda row: None if row.is_host else row.host),
        text("cause", "cause"),
        text(
            "median over the iterations",
            lambda row: "; ".join(deviation.text for deviation in row.deviations),
        ),
        text("unlike most ranks", lambda row: "; ".join(row.facts)),
    )
    note = (
        f"{len(differences.ranks):,} of {differences.compared:,} ranks differ from the "
        "others."
    )
    return Table(
        "differences",
        "Ranks that differ",
        columns,
        differences.differences,
        note,
        _SOURCE,
    )


def rank_table(trace: Trace, table: RankTable) -> Table:
    """Return the table of all ranks, those that differ first."""
    pool = peak_pool(trace)
    columns = (
        number("rank", "rank"),
        text("device", "device_name"),
        *(ms(phase, f"{phase}_ms") for phase in ("iteration", *ITERATION_PARTS)),
        rate("h2d", "h2d_bytes_per_s"),
        rate("d2h", "d2h_bytes_per_s"),
        size(
            f"peak {pool or 'memory'}",
            lambda row: pool_peaks(trace, row.rank).get(pool or ""),
        ),
        size("least free", "free_bytes"),
        number("times slowest", "times_slowest"),
        text("differs by", "cause"),
    )
    rows = sorted(
        table.ranks, key=lambda row: (row.cause is None, -(row.phases_ms or 0.0))
    )
    note = f"Medians over {table.counted} iterations; peaks of the whole trace."
    if any(row.free_bytes is not None for row in rows):
        note += f" {free_note(trace)}"
    return Table("ranks", "Each rank", columns, rows, note, _SOURCE)


def ranks_view(trace: Trace, table: RankTable) -> View:
    """Return the medians of each rank, first those that differ, and how they differ."""
    if not table.counted:
        yield f"{trace.path}: {no_iterations(trace)}"
        return
    yield rank_table(trace, table)
    yield differences_table(table.differences)
