"""The tables of the page, from what the analyses found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ebbtide.analysis.metrics.devices import capacity_bytes, first_device, main_pool, memory_line
from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.iterations import PHASES
from ebbtide.analysis.metrics.link import Link
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.substeps.breakdown import SubSteps
from ebbtide.analysis.metrics.summary import Summary
from ebbtide.analysis.metrics.windows import Window
from ebbtide.analysis.report.columns import Column, Table, counts, milliseconds, rates, shares, sizes, words
from ebbtide.profiler.trace import Trace

# More rows than these are for a program.
MOST_ROWS = 200
_LONGEST = 20

Row = TypeVar("Row")


def summary_table(summary: Summary) -> Table:
    rows = summary.phases
    columns = [
        words("phase", [row.phase for row in rows]),
        milliseconds("median", [row.median_ms for row in rows]),
        milliseconds("p95", [row.p95_ms for row in rows]),
        shares("share", [row.share for row in rows]),
        sizes(f"peak {summary.memory.pool or 'memory'}", [row.peak_bytes for row in rows]),
        sizes("free at peak", [row.min_free_bytes for row in rows]),
        sizes("h2d", [row.h2d_bytes for row in rows]),
        sizes("d2h", [row.d2h_bytes for row in rows]),
    ]
    return Table("phases", "Each phase in an iteration", tuple(columns), "Medians over the counted iterations.")


def window_tables(windows: Sequence[Window], guaranteed: Sequence[Window], most: int) -> list[Table]:
    tables = []
    if guaranteed:
        rows, cut = _cut(guaranteed, most, "ebbtide windows --json has all")
        note = "Free at the same place of every iteration; times are those of an iteration of median phases."
        tables.append(Table("guaranteed", "In every iteration", tuple(_window_columns(rows)), note, cut))
    rows, cut = _cut(
        sorted(windows, key=lambda w: w.start_ms - w.end_ms), min(most, _LONGEST), "ebbtide windows --json has all"
    )
    numbers = (
        [counts("iteration", [row.iteration for row in rows])] if any(r.iteration is not None for r in rows) else []
    )
    first, *others = _window_columns(rows)
    note = "Times count from the start of the iteration." if numbers else "Times count from the start of the trace."
    tables.append(Table("longest", "The longest", (first, *numbers, *others), note, cut))
    return tables


def _window_columns(rows: Sequence[Window]) -> list[Column]:
    return [
        words("phase", [row.phase for row in rows]),
        milliseconds("from", [row.start_ms for row in rows]),
        milliseconds("to", [row.end_ms for row in rows]),
        milliseconds("length", [row.end_ms - row.start_ms for row in rows]),
        sizes("least free", [row.free_bytes for row in rows]),
        shares("h2d idle", [row.h2d_idle_share for row in rows]),
        shares("d2h idle", [row.d2h_idle_share for row in rows]),
    ]


def iteration_table(found: Iterations, rank: int, most: int) -> Table | None:
    rows, cut = _cut([row for row in found.rows if row["rank"] == rank], most, "ebbtide iterations --json has all")
    if not rows:
        return None
    odd = {spread.phase: spread.odd for spread in found.spreads if spread.rank == rank}
    columns = [counts("iteration", [row["iteration"] for row in rows])]
    for phase in ("iteration", *PHASES):
        marks = [row["iteration"] in odd.get(phase, ()) for row in rows]
        columns.append(milliseconds("whole" if phase == "iteration" else phase, _column(rows, f"{phase}_ms"), marks))
    if any(row["warmup"] for row in rows):
        columns.append(words("note", ["warm-up" if row["warmup"] else " " for row in rows]))
    told = [f"{phase} {', '.join(map(str, numbers[:12]))}" for phase, numbers in odd.items() if numbers]
    note = "Odd, which is far from the median of its phase: " + "; ".join(told) + "." if told else None
    return Table("iterations", "Every iteration", tuple(columns), note, cut)


def rank_table(trace: Trace, found: Iterations, most: int) -> Table:
    ranks, cut = _cut(trace.ranks, most, "ebbtide iterations --json has all")
    pool = main_pool(trace)
    peaks = [_peak(trace, rank, pool) for rank in ranks]
    capacities = [capacity_bytes(trace, rank) for rank in ranks]
    known = zip(capacities, peaks, strict=True)
    free = [c - p if c is not None and p is not None else None for c, p in known]
    medians = {(spread.rank, spread.phase): spread.median_ms for spread in found.spreads}
    columns = [
        counts("rank", ranks),
        words(
            "device",
            [first_device(trace, rank).get("name") or first_device(trace, rank).get("device") for rank in ranks],
        ),
    ]
    for phase in ("iteration", *PHASES):
        columns.append(milliseconds(phase, [medians.get((rank, phase)) for rank in ranks]))
    columns += [sizes(f"peak {pool or 'memory'}", peaks), sizes("least free", free)]
    slowest = found.slowest_rank
    if slowest and any(slowest.values()):
        columns.append(counts("times slowest", [slowest.get(rank) for rank in ranks]))
    return Table(
        "ranks", "Each rank", tuple(columns), "Medians over the counted iterations; peaks of the whole trace.", cut
    )


def step_tables(found: SubSteps, most: int) -> list[Table]:
    rows, cut = _cut(found.steps, most, "ebbtide steps --json has all")
    how = "They follow each other" if found.tiles else "They run beside each other: times do not add up"
    note = f"Medians over the counted iterations. {how}. Rate: the faster direction's, while copies run."
    columns = [words("phase", [row.phase for row in rows]), *_step_columns(rows, found.pool)]
    tables = [Table("steps", "Of an iteration", tuple(columns), note, cut)]
    if found.subgroups:
        rows, cut = _cut(found.subgroups, min(most, 3 * _LONGEST), "ebbtide steps --json has all")
        columns = [counts("subgroup", [row.subgroup for row in rows]), *_step_columns(rows, found.pool)]
        count = len({row.subgroup for row in found.subgroups})
        tables.append(Table("subgroups", f"By subgroup, {count:,} in all", tuple(columns), None, cut))
    return tables


def _step_columns(rows: Sequence[SubStep], pool: str | None) -> list[Column]:
    sides = [(row.h2d, row.d2h) for row in rows]
    rate = [max((s.busy_bytes_per_s for s in both if s.busy_bytes_per_s), default=None) for both in sides]
    pageable = [max((s.pageable_share for s in both if s.pageable_share is not None), default=None) for both in sides]
    return [
        words("sub-step", [f"{row.name} (in {row.within})" if row.within else row.name for row in rows]),
        words("on", [row.resource for row in rows]),
        milliseconds("time", [row.median_ms for row in rows]),
        shares("of phase", [row.share for row in rows]),
        sizes("bytes", [row.bytes for row in rows]),
        sizes("h2d", [h2d.bytes for h2d, _ in sides]),
        sizes("d2h", [d2h.bytes for _, d2h in sides]),
        rates("rate", rate),
        shares("pageable", pageable),
        words("waits for", [row.waits_for for row in rows]),
        sizes(f"peak {pool or 'memory'}", [row.peak_bytes for row in rows]),
    ]


def link_tables(found: Link, rank: int) -> list[Table]:
    uses = [u for u in found.phases if u.rank == rank and (u.bytes is not None or u.busy_ms is not None)]
    kinds = [kind for kind in found.copies if kind.rank == rank]
    tables = []
    if uses:
        columns = [
            words("phase", [use.phase for use in uses]),
            words("direction", [use.direction for use in uses]),
            sizes("bytes", [use.bytes for use in uses]),
            rates("mean rate", [use.mean_bytes_per_s for use in uses]),
            shares("of peak", [use.share_of_peak for use in uses]),
        ]
        if kinds:
            columns += [
                milliseconds("busy", [use.busy_ms for use in uses]),
                milliseconds("both ways at once", [use.both_ms for use in uses]),
                rates("rate while busy", [use.busy_bytes_per_s for use in uses]),
            ]
        note = "Medians over the counted iterations."
        tables.append(Table("link", "By phase", tuple(columns), note))
    if kinds:
        columns = [
            words("direction", [kind.direction for kind in kinds]),
            words("host memory", [kind.host_memory or "not told" for kind in kinds]),
            counts("copies", [kind.count for kind in kinds]),
            sizes("bytes", [kind.bytes for kind in kinds]),
            milliseconds("busy", [kind.busy_ms for kind in kinds]),
            rates("rate while busy", [kind.busy_bytes_per_s for kind in kinds]),
        ]
        tables.append(Table("copies", "Copies by direction and host memory", tuple(columns), "Over the whole trace."))
    return tables


def _peak(trace: Trace, rank: int, pool: str | None) -> int | None:
    sizes_of = memory_line(trace, rank, pool)[1] if pool else ()
    return int(max(sizes_of)) if len(sizes_of) else None


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [row[key] for row in rows]


def _cut(rows: Sequence[Row], most: int, how: str) -> tuple[Sequence[Row], str | None]:
    if len(rows) <= most:
        return rows, None
    return rows[:most], f"The first {most:,} of {len(rows):,} rows: {how}."
