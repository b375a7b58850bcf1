"""Builds the tables of the page on sub-steps and on the link."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.analysis.metrics.link import LinkUse
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.substeps.breakdown import SubSteps
from ebbtide.analysis.report.columns import (
    ReportTable,
    TableColumn,
    bytes_column,
    count_column,
    ms_column,
    rate_column,
    share_column,
    text_column,
)
from ebbtide.analysis.report.tables import first_rows

_MAX_SUBGROUP_ROWS = 60
_ALL_STEPS = "ebbtide steps --json has all"


def substep_tables(substeps: SubSteps, max_rows: int) -> list[ReportTable]:
    """Return the table of sub-steps, and that by subgroup where they have any."""
    rows, cut = first_rows(substeps.steps, max_rows, _ALL_STEPS)
    order = "They follow each other" if substeps.tiles else "They run concurrently: times do not add up"
    note = f"Medians over the steady iterations. {order}. Rate: of the faster direction, while copies run."
    columns = [text_column("phase", [row.phase for row in rows]), *_substep_columns(rows, substeps.pool)]
    tables = [ReportTable("steps", "Of an iteration", tuple(columns), note, cut)]
    if substeps.subgroups:
        rows, cut = first_rows(substeps.subgroups, min(max_rows, _MAX_SUBGROUP_ROWS), _ALL_STEPS)
        columns = [count_column("subgroup", [row.subgroup for row in rows]), *_substep_columns(rows, substeps.pool)]
        count = len({row.subgroup for row in substeps.subgroups})
        tables.append(ReportTable("subgroups", f"By subgroup, {count:,} in all", tuple(columns), None, cut))
    return tables


def _substep_columns(rows: Sequence[SubStep], pool: str | None) -> list[TableColumn]:
    directions = [(row.h2d, row.d2h) for row in rows]
    rates = [max((d.busy_bytes_per_s for d in both if d.busy_bytes_per_s), default=None) for both in directions]
    pageable = [
        max((d.pageable_share for d in both if d.pageable_share is not None), default=None) for both in directions
    ]
    return [
        text_column("sub-step", [f"{row.name} (in {row.within})" if row.within else row.name for row in rows]),
        text_column("on", [row.resource for row in rows]),
        ms_column("time", [row.median_ms for row in rows]),
        share_column("of phase", [row.share for row in rows]),
        bytes_column("bytes", [row.bytes for row in rows]),
        bytes_column("h2d", [h2d.bytes for h2d, _ in directions]),
        bytes_column("d2h", [d2h.bytes for _, d2h in directions]),
        rate_column("rate", rates),
        share_column("pageable", pageable),
        text_column("waits for", [row.waits_for for row in rows]),
        bytes_column(f"peak {pool or 'memory'}", [row.peak_bytes for row in rows]),
    ]


def link_tables(link: LinkUse, rank: int) -> list[ReportTable]:
    """Return the tables of a rank's link by phase and by kind of copies, as far as they were recorded."""
    uses = [use for use in link.phases if use.rank == rank and (use.bytes is not None or use.busy_ms is not None)]
    kinds = [kind for kind in link.copies if kind.rank == rank]
    tables = []
    if uses:
        columns = [
            text_column("phase", [use.phase or "whole trace" for use in uses]),
            text_column("direction", [use.direction for use in uses]),
            bytes_column("bytes", [use.bytes for use in uses]),
            rate_column("mean rate", [use.mean_bytes_per_s for use in uses]),
            share_column("of peak", [use.share_of_peak for use in uses]),
        ]
        if kinds:
            columns += [
                ms_column("busy", [use.busy_ms for use in uses]),
                ms_column("both directions at once", [use.both_ms for use in uses]),
                rate_column("rate while busy", [use.busy_bytes_per_s for use in uses]),
            ]
        over = "Medians over the steady iterations." if uses[0].phase else "Over the whole trace."
        tables.append(ReportTable("link", "By phase", tuple(columns), over))
    if kinds:
        columns = [
            text_column("direction", [kind.direction for kind in kinds]),
            text_column("host memory", [kind.host_memory or "unknown" for kind in kinds]),
            count_column("copies", [kind.count for kind in kinds]),
            bytes_column("bytes", [kind.bytes for kind in kinds]),
            ms_column("busy", [kind.busy_ms for kind in kinds]),
            rate_column("rate while busy", [kind.busy_bytes_per_s for kind in kinds]),
        ]
        title = "Copies by direction and host memory"
        tables.append(ReportTable("copies", title, tuple(columns), "Over the whole trace."))
    return tables
