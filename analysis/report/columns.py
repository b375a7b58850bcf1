"""Tables of the page: all figures of a column have one unit, so that they can be compared and sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ebbtide.units import bytes_unit

# Text of a value that was not recorded.
UNKNOWN = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: The value as text.
        value: The value that a figure is sorted by; None where it is unknown.
        is_outlier: Whether the page marks it.
    """

    text: str
    value: float | None = None
    is_outlier: bool = False


@dataclass(frozen=True)
class TableColumn:
    """A column: label, cells, their unit, and whether they are figures."""

    label: str
    cells: Sequence[Cell]
    unit: str | None = None
    is_number: bool = True


@dataclass(frozen=True)
class ReportTable:
    """A table of the page.

    Attributes:
        name: Its id in the page.
        title: Heading.
        all_columns: Columns, also those without any value.
        note: Line below the heading.
        cut: Line on rows that are left out; None where the table is complete.
    """

    name: str
    title: str
    all_columns: tuple[TableColumn, ...]
    note: str | None = None
    cut: str | None = None

    @property
    def columns(self) -> list[TableColumn]:
        """Columns with at least one value."""
        return [column for column in self.all_columns if any(cell.text != UNKNOWN for cell in column.cells)]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """Cells of `columns`, row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def text_column(label: str, values: Iterable[str | None]) -> TableColumn:
    """Return a column of text."""
    return TableColumn(label, [Cell(value or UNKNOWN) for value in values], is_number=False)


def count_column(label: str, values: Iterable[int | None]) -> TableColumn:
    """Return a column of counts."""
    return number_column(label, values)


def number_column(label: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of numbers of several units, rounded to whole ones."""
    return TableColumn(label, _cells(values, "{:,.0f}".format))


def ms_column(label: str, values: Iterable[float | None], outliers: Iterable[bool] | None = None) -> TableColumn:
    """Return a column of milliseconds; `outliers` says which of them the page marks."""
    values = list(values)
    digits = 2 if _largest(values) < 10 else 1 if _largest(values) < 10_000 else 0
    return TableColumn(label, _cells(values, f"{{:,.{digits}f}}".format, outliers), "ms")


def us_column(label: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of microseconds."""
    return TableColumn(label, _cells(values, "{:,.1f}".format), "us")


def bytes_column(label: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of bytes, all in the unit that suits the largest."""
    values = list(values)
    scale, unit = bytes_unit(_largest(values))
    return TableColumn(label, _cells(values, lambda size: f"{size / scale:,.{0 if scale == 1 else 2}f}"), unit)


def share_column(label: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of shares, in percent."""
    return TableColumn(label, _cells(values, lambda share: f"{100 * share:.0f}"), "%")


def rate_column(label: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of bytes per second, in GB/s, the unit of link ratings."""
    return TableColumn(label, _cells(values, lambda rate: f"{rate / 1e9:,.2f}"), "GB/s")


def _largest(values: Sequence[float | None]) -> float:
    return max((abs(value) for value in values if value is not None), default=0.0)


def _cells(
    values: Iterable[float | None], to_text: Callable[[float], str], outliers: Iterable[bool] | None = None
) -> list[Cell]:
    values = list(values)
    marks = list(outliers) if outliers is not None else [False] * len(values)
    return [Cell(UNKNOWN if v is None else to_text(v), v, mark) for v, mark in zip(values, marks, strict=True)]
