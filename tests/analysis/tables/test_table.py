"""Tests the table of a result."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.analysis.tables import table as columns
from ebbtide.analysis.tables.table import Table

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A row of a result."""

    phase: str
    peak_bytes: int | None
    time_ms: float | None = None


ROWS = [
    Row("forward", 3 * GIB, 12_345.6),
    Row("backward", None, 1.0),
    Row("update", GIB // 2),
]
TABLE = Table(
    "phases",
    "Phases <b>",
    (
        columns.text("phase", "phase"),
        columns.size("peak", "peak_bytes"),
        columns.ms("time", "time_ms", is_outlier=lambda row: row.time_ms == 1.0),
        columns.number("copies", lambda row: None),
        columns.share("half", lambda row: 0.5),
    ),
    ROWS,
    "A note.",
    "ebbtide phases --json",
)


def test_table__has_one_unit_a_column_and_values_to_sort_by() -> None:
    phase, peak, time, half = TABLE.columns
    assert (phase.is_number, [cell.text for cell in phase.cells]) == (
        False,
        ["forward", "backward", "update"],
    )
    assert (peak.unit, [cell.text for cell in peak.cells]) == (
        "GiB",
        ["3.00", "-", "0.50"],
    )
    assert [cell.value for cell in peak.cells] == [3 * GIB, None, GIB // 2]
    assert (time.heading, [cell.text for cell in time.cells]) == (
        "time ms",
        ["12,346", "1", "-"],
    )
    assert [cell.is_outlier for cell in time.cells] == [False, True, False]
    assert (half.unit, half.cells[0].text) == ("%", "50")


def test_table__omits_columns_without_values_and_rows_above_its_limit() -> None:
    assert [column.label for column in TABLE.columns] == [
        "phase",
        "peak",
        "time",
        "half",
    ]
    assert (len(TABLE.rows), TABLE.cut) == (3, None)
    first = TABLE.first(1)
    assert [[cell.text for cell in row] for row in first.rows] == [
        ["forward", "3.00", "12,346", "50"]
    ]
    assert first.cut == "The first 1 of 3 rows: ebbtide phases --json has more."
    assert not Table("empty", "", TABLE.all_columns, [])


def test_repr_html__escapes_texts() -> None:
    html = TABLE._repr_html_()
    assert "<caption>Phases &lt;b&gt;</caption>" in html
    assert html.count("<tr>") == 4
    assert "<th>peak GiB</th>" in html
    assert "<p>A note.</p>" in html
