"""Assigns the rows of a sweep to the panels of its picture, and chooses their axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.units import count_text

_MAX_PANELS = 24
_MAX_MACHINES = 6
# Bars have names, lines only styles to be told apart.
_MAX_BARS, _MAX_LINES = 24, 8


@dataclass(frozen=True)
class Axis:
    """A column of the table that may be swept.

    Attributes:
        column: Name of the column.
        label: Label of the axis.
        text: Formats a value as a tick.
        unit: Text after a value in the name of a panel row.
    """

    column: str
    label: str
    text: Callable[[Any], str]
    unit: str


AXES = (
    Axis("scale_params", "times the parameters", lambda value: f"{value:g}", " x parameters"),
    Axis("free_bytes", "device memory always free (GB)", lambda value: f"{value / 1e9:.4g}", " GB free"),
    Axis("subgroup_params", "parameters per subgroup", lambda value: count_text(value).replace(" ", ""), " a subgroup"),
    Axis("host_free_bytes", "free host memory (GB)", lambda value: f"{value / 1e9:.4g}", " GB of host memory"),
)


@dataclass(frozen=True)
class PanelRow:
    """One row of panels: a workload, and the values of the swept columns that are not the axis."""

    workload: str
    values: tuple[tuple[Axis, Any], ...]

    @property
    def name(self) -> str:
        return ", ".join([self.workload, *(f"{axis.text(value)}{axis.unit}" for axis, value in self.values)])


@dataclass(frozen=True)
class Grid:
    """The panels of a picture: one row of panels per workload and scenario, one column per machine.

    Attributes:
        rows: Rows of the sweep.
        axis: Swept column that panels are drawn along; None if no scenario was swept.
        ticks: Values of the axis, in order.
        panel_rows: Rows of panels.
        machines: Names of the machines.
        policies: Texts of the policies.
    """

    rows: Sequence[Row]
    axis: Axis | None
    ticks: list[Any]
    panel_rows: list[PanelRow]
    machines: list[str]
    policies: list[str]

    @staticmethod
    def of(rows: Sequence[Row]) -> Grid:
        """Arrange the rows of a sweep.

        Raises:
            UserError: There are more panels or policies than anybody can read.
        """
        values = {axis: _values(rows, axis.column) for axis in AXES}
        swept = [axis for axis in AXES if len(values[axis]) > 1]
        axis = max(swept, key=lambda axis: len(values[axis]), default=None)
        others = [other for other in swept if other is not axis]
        panel_rows = dict.fromkeys(_panel_row(row, others) for row in rows)
        grid = Grid(
            rows=rows,
            axis=axis,
            ticks=sorted(values[axis]) if axis else [],
            panel_rows=list(panel_rows),
            machines=_values(rows, "machine"),
            policies=_values(rows, "policy"),
        )
        if len(grid.panel_rows) * len(grid.machines) > _MAX_PANELS or len(grid.machines) > _MAX_MACHINES:
            raise UserError(
                f"--plot would need {len(grid.panel_rows)} rows of {len(grid.machines)} panels, more than "
                f"{_MAX_PANELS} in all or {_MAX_MACHINES} in a row: draw a smaller sweep, or leave --plot out"
            )
        most = _MAX_LINES if grid.axis else _MAX_BARS
        if len(grid.policies) > most:
            kind = "lines" if grid.axis else "bars"
            raise UserError(f"--plot shows at most {most} policies as {kind}: draw fewer, or leave --plot out")
        return grid

    def points(self, panel_row: PanelRow, machine: str) -> dict[tuple[str, Any], Row]:
        """Return the rows of a panel by policy and value on the axis (None without an axis)."""
        others = [axis for axis, _ in panel_row.values]
        return {
            (row["policy"], row[self.axis.column] if self.axis else None): row
            for row in self.rows
            if row["machine"] == machine and _panel_row(row, others) == panel_row
        }


def _panel_row(row: Row, others: Sequence[Axis]) -> PanelRow:
    return PanelRow(row["workload"], tuple((axis, row[axis.column]) for axis in others))


def _values(rows: Iterable[Row], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
