"""Tables of the page: a unit for each column, so that its figures stand under each other and can be sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ebbtide.units import bytes_unit

UNKNOWN = "–"


@dataclass(frozen=True)
class Cell:
    """text: as people read it. value: what a figure is sorted by, None where it is not known. odd: to be marked."""

    text: str
    value: float | None = None
    odd: bool = False


@dataclass(frozen=True)
class Column:
    label: str
    cells: Sequence[Cell]
    unit: str | None = None
    number: bool = True


@dataclass(frozen=True)
class Table:
    """name: its id in the page. cut: a line that says which rows are left out, None where all are there."""

    name: str
    title: str
    all_columns: tuple[Column, ...]
    note: str | None = None
    cut: str | None = None

    @property
    def columns(self) -> list[Column]:
        """Those that hold anything: what was not recorded at all would be a column of dashes."""
        return [column for column in self.all_columns if any(cell.text != UNKNOWN for cell in column.cells)]

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))


def words(label: str, values: Iterable[str | None]) -> Column:
    return Column(label, [Cell(value or UNKNOWN) for value in values], number=False)


def counts(label: str, values: Iterable[int | None]) -> Column:
    return Column(label, _cells(values, "{:,.0f}".format))


def milliseconds(label: str, values: Iterable[float | None], odd: Iterable[bool] | None = None) -> Column:
    values = list(values)
    digits = 2 if _largest(values) < 10 else 1 if _largest(values) < 10_000 else 0
    return Column(label, _cells(values, f"{{:,.{digits}f}}".format, odd), "ms")


def sizes(label: str, values: Iterable[float | None]) -> Column:
    """Bytes, all in the unit in which the largest reads best."""
    values = list(values)
    scale, unit = bytes_unit(_largest(values))
    return Column(label, _cells(values, lambda size: f"{size / scale:,.{0 if scale == 1 else 2}f}"), unit)


def shares(label: str, values: Iterable[float | None]) -> Column:
    return Column(label, _cells(values, lambda share: f"{100 * share:.0f}"), "%")


def rates(label: str, values: Iterable[float | None]) -> Column:
    """Bytes per second, in GB/s as links are rated."""
    return Column(label, _cells(values, lambda rate: f"{rate / 1e9:,.2f}"), "GB/s")


def _largest(values: Sequence[float | None]) -> float:
    return max((abs(value) for value in values if value is not None), default=0.0)


def _cells(
    values: Iterable[float | None], text: Callable[[float], str], odd: Iterable[bool] | None = None
) -> list[Cell]:
    values = list(values)
    marks = list(odd) if odd is not None else [False] * len(values)
    return [Cell(UNKNOWN if v is None else text(v), v, mark) for v, mark in zip(values, marks, strict=True)]
