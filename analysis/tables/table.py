"""A table of a result: columns with labels and units over the rows of the result.

All figures of a column have one unit, so that they can be compared and sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from operator import attrgetter
from typing import Any

from ebbtide.analysis.metrics.devices import free_memory_text, ran_on_cpu
from ebbtide.profiler.trace import Trace
from ebbtide.units import NO_VALUE, RATE_UNITS, bytes_text, bytes_unit, count_text

# Of the figures of a column: returns a function from a figure to its text, and their
# unit.
Formatter = Callable[
    [Sequence[float | None]], tuple[Callable[[float], str], str | None]
]


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str  # The value as text.
    # The value that a figure is sorted by; None where it is not known, and of text.
    value: float | None = None
    is_outlier: bool = False  # Whether it is marked.


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    label: str  # Heading, without the unit.
    value: Callable[[Any], Any]  # Returns the value of a row.
    formatter: Formatter | None = None  # Formats figures; None: values are text.
    # Whether the figure of a row is marked.
    is_outlier: Callable[[Any], bool] = lambda row: False


@dataclass(frozen=True)
class PrintedColumn:
    """A column as it is printed: cells, and the unit that all of them have."""

    label: str
    cells: Sequence[Cell]
    unit: str | None
    is_number: bool

    @property
    def heading(self) -> str:
        """Label and unit."""
        return f"{self.label} {self.unit}".strip() if self.unit else self.label


@dataclass(frozen=True)
class Table:
    """A table of a result."""

    name: str  # Its name in documents.
    title: str  # Heading.
    all_columns: Sequence[Column]  # Columns, also those without any value.
    all_rows: Sequence[Any]  # Rows of the result.
    note: str | None = None  # Line on the figures.
    # Command that prints all rows where a printer leaves some out.
    source: str | None = None
    max_rows: int | None = 40  # Most rows that people read; None: all.

    def __bool__(self) -> bool:
        return bool(self.all_rows)

    def first(self, max_rows: int) -> Table:
        """Return the table with at most `max_rows` rows."""
        return replace(self, max_rows=max_rows)

    @property
    def shown_rows(self) -> Sequence[Any]:
        """The rows that are printed."""
        return self.all_rows[: self.max_rows]

    @property
    def cut(self) -> str | None:
        """Line on the rows that are left out; None where all are printed."""
        if len(self.shown_rows) == len(self.all_rows):
            return None
        source = f": {self.source} has more" if self.source else ""
        return (
            f"The first {len(self.shown_rows):,} of {len(self.all_rows):,} "
            f"rows{source}."
        )

    @property
    def columns(self) -> list[PrintedColumn]:
        """Columns as they are printed, without those that have no value."""
        printed = (_printed(column, self.shown_rows) for column in self.all_columns)
        return [
            column
            for column in printed
            if any(cell.text != NO_VALUE for cell in column.cells)
        ]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """Cells of `columns`, row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{escape(column.heading)}</th>" for column in self.columns)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell.text)}</td>' for cell in row)}</tr>"
            for row in self.rows
        )
        lines = "".join(
            f"<p>{escape(line)}</p>" for line in (self.note, self.cut) if line
        )
        return (
            f"<table><caption>{escape(self.title)}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{lines}"
        )


class Gain(str):
    """A line that says what to do, and what it gains."""


class Misfit(str):
    """A line that says that something does not fit."""


# Lines and tables of a result in the order in which people read them. Tables without
# rows are not printed.
View = Iterator[str | Table]


def free_note(trace: Trace) -> str:
    """Return the line that defines free memory."""
    others = "; what other processes use counts as free" if ran_on_cpu(trace) else ""
    return f"Free memory is {free_memory_text(trace)}{others}."


def always_free(trace: Trace) -> str:
    """Return a sentence on the memory that is free at every moment of every steady
    iteration, on every rank."""
    from ebbtide.analysis.metrics.job import JobMetrics

    free = JobMetrics(trace).always_free_bytes
    ranks = " on all ranks" if len(trace.ranks) > 1 else ""
    return (
        "" if free is None or free <= 0 else f" Always{ranks}: {bytes_text(free)} free."
    )


def _largest(values: Sequence[float | None]) -> float:
    return max((abs(value) for value in values if value is not None), default=0.0)


def _format_ms(values: Sequence[float | None]) -> tuple[Callable[[float], str], str]:
    largest = _largest(values)
    digits = 2 if largest < 10 else 1 if largest < 10_000 else 0
    return f"{{:,.{digits}f}}".format, "ms"


def _format_bytes(values: Sequence[float | None]) -> tuple[Callable[[float], str], str]:
    scale, unit = bytes_unit(_largest(values))
    return lambda amount: f"{amount / scale:,.{0 if scale == 1 else 2}f}", unit


def _format_rates(values: Sequence[float | None]) -> tuple[Callable[[float], str], str]:
    largest = _largest(values)
    scale, unit = next(
        (entry for entry in RATE_UNITS if largest >= entry[0]), (1e9, "GB/s")
    )
    return (
        lambda amount: f"{amount / scale:,.{2 if largest < 100 * scale else 1}f}",
        unit,
    )


def _kind(formatter: Formatter | None) -> Callable[..., Column]:
    """Return a function that makes columns of a label and a value.

    The value is an attribute of the rows, or a function of a row.
    """

    def column(label: str, value: str | Callable[[Any], Any], **options: Any) -> Column:
        return Column(
            label,
            attrgetter(value) if isinstance(value, str) else value,
            formatter,
            **options,
        )

    return column


text = _kind(None)
# Counts, or numbers of several units, rounded to whole ones; large counts, as in `3.83
# G`.
number = _kind(lambda values: ("{:,.0f}".format, None))
count = _kind(lambda values: (count_text, None))
ms = _kind(_format_ms)
us = _kind(lambda values: ("{:,.1f}".format, "us"))
# Bytes, and bytes per second, all in the unit that suits the largest.
size = _kind(_format_bytes)
rate = _kind(_format_rates)
# Parameters per second, in 1e9.
params_rate = _kind(lambda values: (lambda rate: f"{rate / 1e9:.2f}", "G/s"))


def share(
    label: str,
    value: str | Callable[[Any], float | None],
    digits: int = 0,
    **options: Any,
) -> Column:
    """Return a column of shares, in percent."""
    return _kind(lambda values: (lambda part: f"{100 * part:.{digits}f}", "%"))(
        label, value, **options
    )


def signed(column: Column) -> Column:
    """Return a column of differences, whose positive figures have a sign."""
    formatter = column.formatter
    assert formatter is not None

    def format_signed(
        values: Sequence[float | None],
    ) -> tuple[Callable[[float], str], str | None]:
        to_text, unit = formatter(values)
        return lambda value: f"{'+' if value > 0 else ''}{to_text(value)}", unit

    return replace(column, formatter=format_signed)


def _printed(column: Column, rows: Sequence[Any]) -> PrintedColumn:
    values = [column.value(row) for row in rows]
    if column.formatter is None:
        return PrintedColumn(
            column.label,
            [Cell(value or NO_VALUE) for value in values],
            None,
            is_number=False,
        )
    to_text, unit = column.formatter(values)
    cells = [
        Cell(
            NO_VALUE if value is None else to_text(value),
            value,
            column.is_outlier(row),
        )
        for row, value in zip(rows, values, strict=True)
    ]
    return PrintedColumn(column.label, cells, unit, is_number=True)
