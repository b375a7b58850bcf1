"""Which rows of a sweep stand in which panel of its picture, and along which axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.units import count_text

_MOST_PANELS = 24
_MOST_MACHINES = 6
_MOST_POLICIES = 8


@dataclass(frozen=True)
class Axis:
    """A column of the table that may be swept: what its values are called on an axis, and as one of many."""

    column: str
    label: str
    text: Callable[[Any], str]
    unit: str


AXES = (
    Axis("scale_params", "times the parameters", lambda value: f"{value:g}", " x parameters"),
    Axis("free_bytes", "device memory always free (GB)", lambda value: f"{value / 1e9:.4g}", " GB free"),
    Axis(
        "subgroup_params", "parameters of a subgroup", lambda value: count_text(value).replace(" ", ""), " a subgroup"
    ),
)


@dataclass(frozen=True)
class Scene:
    """A row of panels: a workload, and the values of the axes that are not drawn along."""

    workload: str
    values: tuple[tuple[Axis, Any], ...]

    @property
    def name(self) -> str:
        return ", ".join([self.workload, *(f"{axis.text(value)}{axis.unit}" for axis, value in self.values)])


@dataclass(frozen=True)
class Grid:
    """axis: what panels are drawn along, None where no scenario was swept; ticks: its values, in order."""

    rows: Sequence[Row]
    axis: Axis | None
    ticks: list[Any]
    scenes: list[Scene]
    machines: list[str]
    policies: list[str]

    @staticmethod
    def of(rows: Sequence[Row]) -> Grid:
        """Raises UserError for more panels or policies than can be read."""
        values = {axis: _values(rows, axis.column) for axis in AXES}
        swept = [axis for axis in AXES if len(values[axis]) > 1]
        axis = max(swept, key=lambda axis: len(values[axis]), default=None)
        others = [other for other in swept if other is not axis]
        scenes = dict.fromkeys(_scene(row, others) for row in rows)
        grid = Grid(
            rows=rows,
            axis=axis,
            ticks=sorted(values[axis]) if axis else [],
            scenes=list(scenes),
            machines=_values(rows, "machine"),
            policies=_values(rows, "policy"),
        )
        if len(grid.scenes) * len(grid.machines) > _MOST_PANELS or len(grid.machines) > _MOST_MACHINES:
            raise UserError(
                f"--plot would need {len(grid.scenes)} rows of {len(grid.machines)} panels: it has room for "
                f"{_MOST_PANELS}, {_MOST_MACHINES} in a row; draw a smaller sweep, or leave --plot out"
            )
        if len(grid.policies) > _MOST_POLICIES:
            raise UserError(f"--plot shows at most {_MOST_POLICIES} policies: draw fewer, or leave --plot out")
        return grid

    def points(self, scene: Scene, machine: str) -> dict[tuple[str, Any], Row]:
        """The rows of a panel, by policy and value on the axis."""
        others = [axis for axis, _ in scene.values]
        return {
            (row["policy"], row[self.axis.column] if self.axis else None): row
            for row in self.rows
            if row["machine"] == machine and _scene(row, others) == scene
        }


def _scene(row: Row, others: Sequence[Axis]) -> Scene:
    return Scene(row["workload"], tuple((axis, row[axis.column]) for axis in others))


def _values(rows: Iterable[Row], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
