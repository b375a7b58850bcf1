"""Builds the tables of the page: phases, windows, iterations, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.summary import Summary
from ebbtide.analysis.metrics.windows import Window, Windows
from ebbtide.analysis.report.columns import (
    ReportTable,
    TableColumn,
    bytes_column,
    count_column,
    ms_column,
    share_column,
    text_column,
)
from ebbtide.phases import ITERATION_PARTS

# Most rows of a table. More rows are for a program to read.
MAX_ROWS = 200
MAX_WINDOWS = 20
_ALL_WINDOWS = "ebbtide windows --json has all"
_ALL_ITERATIONS = "ebbtide iterations --json has all"
_MAX_LISTED_OUTLIERS = 12

Row = TypeVar("Row")


def first_rows(rows: Sequence[Row], max_rows: int, source: str) -> tuple[Sequence[Row], str | None]:
    """Return at most `max_rows` rows, and a line on those left out: None where there are none."""
    if len(rows) <= max_rows:
        return rows, None
    return rows[:max_rows], f"The first {max_rows:,} of {len(rows):,} rows: {source}."


def summary_table(summary: Summary, free_memory: str) -> ReportTable:
    """Return the table of phases; `free_memory`: definition of free memory, as in `capacity minus reserved`."""
    rows = summary.phases
    columns = [
        text_column("phase", [row.phase for row in rows]),
        ms_column("median", [row.median_ms for row in rows]),
        ms_column("p95", [row.p95_ms for row in rows]),
        share_column("share", [row.share for row in rows]),
        bytes_column(f"peak {summary.memory.pool or 'memory'}", [row.peak_bytes for row in rows]),
        bytes_column("free at peak", [row.min_free_bytes for row in rows]),
        bytes_column("h2d", [row.h2d_bytes for row in rows]),
        bytes_column("d2h", [row.d2h_bytes for row in rows]),
    ]
    note = "Medians over the steady iterations."
    if any(row.min_free_bytes is not None for row in rows):
        note += f" {free_note(free_memory)}"
    return ReportTable("phases", "Each phase in an iteration", tuple(columns), note)


def window_tables(windows: Windows, free_memory: str, max_rows: int) -> list[ReportTable]:
    """Return the table of windows that every iteration has (if there are any), and that of the longest windows.

    Args:
        windows: The windows.
        free_memory: Definition of free memory, as in `capacity minus reserved`.
        max_rows: Most rows of a table.
    """
    tables = []
    if windows.guaranteed:
        rows, cut = first_rows(windows.guaranteed, max_rows, _ALL_WINDOWS)
        note = "Free at the same position in every iteration; times are those of an iteration of median phases."
        note = f"{note} {free_note(free_memory)}"
        tables.append(ReportTable("guaranteed", "In every iteration", tuple(_window_columns(rows)), note, cut))
    by_length = sorted(windows.windows, key=lambda w: w.start_ms - w.end_ms)
    rows, cut = first_rows(by_length, min(max_rows, MAX_WINDOWS), _ALL_WINDOWS)
    has_iterations = any(row.iteration is not None for row in rows)
    numbers = [count_column("iteration", [row.iteration for row in rows])] if has_iterations else []
    phase, *others = _window_columns(rows)
    note = f"Times count from the start of the {'iteration' if has_iterations else 'trace'}. {free_note(free_memory)}"
    tables.append(ReportTable("longest", "The longest", (phase, *numbers, *others), note, cut))
    return tables


def _window_columns(rows: Sequence[Window]) -> list[TableColumn]:
    return [
        text_column("phase", [row.phase for row in rows]),
        ms_column("from", [row.start_ms for row in rows]),
        ms_column("to", [row.end_ms for row in rows]),
        ms_column("length", [row.end_ms - row.start_ms for row in rows]),
        bytes_column("least free", [row.free_bytes for row in rows]),
        share_column("h2d idle", [row.h2d_idle_share for row in rows]),
        share_column("d2h idle", [row.d2h_idle_share for row in rows]),
    ]


def iteration_table(iterations: Iterations, rank: int, max_rows: int) -> ReportTable | None:
    """Return the table of a rank's iterations; None where it has none."""
    rows, cut = first_rows([row for row in iterations.rows if row["rank"] == rank], max_rows, _ALL_ITERATIONS)
    if not rows:
        return None
    outliers = {spread.phase: spread.outliers for spread in iterations.spreads if spread.rank == rank}
    columns = [count_column("iteration", [row["iteration"] for row in rows])]
    for phase in ("iteration", *ITERATION_PARTS):
        marks = [row["iteration"] in outliers.get(phase, ()) for row in rows]
        columns.append(ms_column("total" if phase == "iteration" else phase, _values(rows, f"{phase}_ms"), marks))
    if any(row["warmup"] for row in rows):
        columns.append(text_column("note", ["warm-up" if row["warmup"] else " " for row in rows]))
    listed = [
        f"{phase} {', '.join(map(str, numbers[:_MAX_LISTED_OUTLIERS]))}"
        for phase, numbers in outliers.items()
        if numbers
    ]
    note = "Outliers, far from the median of their phase: " + "; ".join(listed) + "." if listed else None
    return ReportTable("iterations", "Every iteration", tuple(columns), note, cut)


def free_note(free_memory: str) -> str:
    """Return the line that defines free memory."""
    return f"Free memory is {free_memory}."


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [row[key] for row in rows]
