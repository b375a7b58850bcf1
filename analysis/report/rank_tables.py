"""Builds the tables of the page about ranks: those that differ, and all of them."""

from __future__ import annotations

from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    first_device,
    free_memory_text,
    free_pool,
    peak_pool,
    pool_peaks,
)
from ebbtide.analysis.metrics.ranks.by_rank import rank_table as summarize_ranks
from ebbtide.analysis.metrics.ranks.differences import RankDifferences, ranks_text
from ebbtide.analysis.report.columns import ReportTable, bytes_column, count_column, ms_column, text_column
from ebbtide.analysis.report.tables import MAX_ROWS, first_rows, free_note
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

_ALL_RANKS = "ebbtide iterations --by-rank --json has all"


def differences_table(differences: RankDifferences) -> ReportTable | None:
    """Return the table of the ranks and hosts that differ; None where none does."""
    if not differences.differences:
        return None
    rows, cut = first_rows(differences.differences, MAX_ROWS, _ALL_RANKS)
    columns = (
        text_column("rank or host", [row.name for row in rows]),
        text_column("ranks of the host", [ranks_text(row.ranks) if row.is_host else None for row in rows]),
        text_column("on host", [None if row.is_host else row.host for row in rows]),
        text_column("cause", [row.cause for row in rows]),
        text_column(
            "median over the iterations", ["; ".join(deviation.text for deviation in row.deviations) for row in rows]
        ),
        text_column("unlike most ranks", ["; ".join(row.facts) for row in rows]),
    )
    note = f"{len(differences.ranks):,} of {differences.compared:,} ranks differ from the others."
    return ReportTable("differences", "Ranks that differ", columns, note, cut)


def rank_table(trace: Trace, max_rows: int) -> ReportTable:
    """Return the table of all ranks, or of the first ones and those that differ."""
    table = summarize_ranks(trace)
    ordered = table.ranks
    if len(ordered) > max_rows:
        ordered = sorted(ordered, key=lambda row: (row.cause is None, row.rank))
    rows, cut = first_rows(ordered, max_rows, _ALL_RANKS)
    pool, free = peak_pool(trace), free_pool(trace)
    peaks = [pool_peaks(trace, row.rank).get(pool or "") for row in rows]
    capacities = [capacity_bytes(trace, row.rank) for row in rows]
    used = [pool_peaks(trace, row.rank).get(free or "") for row in rows]
    least_free = [None if c is None or u is None else c - u for c, u in zip(capacities, used, strict=True)]
    devices = [first_device(trace, row.rank) for row in rows]
    columns = [
        count_column("rank", [row.rank for row in rows]),
        text_column("device", [device.name or device.device for device in devices]),
    ]
    for phase in ("iteration", *ITERATION_PARTS):
        columns.append(ms_column(phase, [getattr(row, f"{phase}_ms") for row in rows]))
    columns += [bytes_column(f"peak {pool or 'memory'}", peaks), bytes_column("least free", least_free)]
    if any(row.times_slowest for row in table.ranks):
        columns.append(count_column("times slowest", [row.times_slowest for row in rows]))
    columns.append(text_column("differs by", [row.cause for row in rows]))
    note = "Medians over the steady iterations; peaks of the whole trace."
    if any(size is not None for size in least_free):
        note += f" {free_note(free_memory_text(trace))}"
    return ReportTable("ranks", "Each rank", tuple(columns), note, cut)
