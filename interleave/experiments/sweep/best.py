"""Finds the best policy in each scenario of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ebbtide
from ebbtide.analysis.tables.table import Column, Gain, Table, View, ms, share, size, text
from ebbtide.errors import UserError
from ebbtide.interleave.advise.tables import FITS_TEXTS
from ebbtide.interleave.experiments.sweep.task import Row, Task
from ebbtide.units import bytes_text, count_text

BASELINE = "zero-offload"
_MAX_PANELS = 24
_MAX_MACHINES = 6
# Bars have names, lines only styles to be told apart.
_MAX_BARS, _MAX_LINES = 24, 8
_MAX_ROWS = 40
# The rows of best policies on one screen.
_MAX_SHORT = 12
_BYTES: dict[str, Callable[[Row], float]] = {
    "device memory": itemgetter("peak_device_bytes"),
    "host memory": itemgetter("host_bytes"),
    "storage traffic": lambda row: row["storage_read_bytes"] + row["storage_written_bytes"],
}
_FIGURES = (
    "least_free_bytes",
    "compute_ms",
    "iteration_ms",
    "forward_ms",
    "backward_ms",
    "update_ms",
    "other_ms",
    "exposed_ms",
    "h2d_bytes",
    "d2h_bytes",
    "cpu_busy_share",
    "gpu_busy_share",
    "h2d_busy_share",
    "d2h_busy_share",
    "peak_device_bytes",
    "host_bytes",
    "storage_read_bytes",
    "storage_written_bytes",
    "storage_written_bytes_per_day",
    "bound_update_ms",
    "bound_iteration_ms",
    "bound_exposed_ms",
    "bound_exposed_whole_subgroups_ms",
    "bound_overlap_iteration_ms",
    "bound_overlap_exposed_ms",
    "bound_overlap_exposed_whole_subgroups_ms",
    "redone_iteration_ms",
    "storage_read_busy_share",
    "storage_write_busy_share",
)
# Null means not known. scale_params, free_bytes, subgroup_params and host_free_bytes are the scenario (1 and null: the
# workload as it is); params, subgroups, largest_subgroup_params and least_free_bytes are those of the changed workload.
# compute_ms is the iteration without its optimizer; the other figures are those of `ebbtide replay`, busy shares of the
# update phase. note: why results are not exact. error: why there are no figures.
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("workload", "machine", "policy")),
        pa.field("scale_params", pa.float64(), nullable=False),
        pa.field("free_bytes", pa.float64()),
        pa.field("host_free_bytes", pa.float64()),
        *(pa.field(name, pa.int64()) for name in ("subgroup_params", "params", "subgroups", "largest_subgroup_params")),
        *(pa.field(name, pa.float64()) for name in _FIGURES),
        pa.field("fits", pa.bool_()),
        pa.field("limited_by", pa.string()),
        pa.field("bound_overlap", pa.string()),
        pa.field("speculated_subgroups", pa.int64()),
        pa.field("stored_subgroups", pa.int64()),
        pa.field("exact", pa.bool_()),
        pa.field("note", pa.string()),
        pa.field("error", pa.string()),
    ]
)


# The columns of which each combination of values has a best policy: the first fields of `BestPolicy`.
_GROUP = ("workload", "machine", "scale_params", "free_bytes", "host_free_bytes")


@dataclass(frozen=True)
class BestPolicy:
    """The fastest combination of a workload, a machine and a scenario, over policies and subgroup sizes."""

    workload: str
    machine: str
    scale_params: float
    free_bytes: float | None  # Free memory of the scenario; None for that of the workload.
    host_free_bytes: float | None
    row: Row | None  # Row of the combination; None if no combination fits.
    speed_up: float | None  # Speed-up over the baseline with the same subgroups; None if that is not in the sweep.

    @property
    def above_bound(self) -> float | None:
        """Time of the iteration above the lower bound with the policy's overlap, as a share of the bound."""
        if self.row is None or not self.row["bound_overlap_iteration_ms"]:
            return None
        return float(self.row["iteration_ms"] / self.row["bound_overlap_iteration_ms"] - 1)

    def as_json(self) -> dict[str, object]:
        names = (
            "policy",
            "params",
            "largest_subgroup_params",
            "least_free_bytes",
            "iteration_ms",
            "exposed_ms",
            "fits",
            "exact",
            "peak_device_bytes",
            "host_bytes",
            "storage_read_bytes",
            "storage_written_bytes",
        )
        return {
            **{name: getattr(self, name) for name in _GROUP},
            **{name: self.row[name] if self.row else None for name in names},
            "speed_up": self.speed_up,
            "above_bound_share": self.above_bound,
        }


def find_best(rows: Sequence[Row]) -> list[BestPolicy]:
    """Return the best combination of each workload, machine, size, and free memory of device and host, in order.

    Combinations that are exact come before those that are not, and those that fit before those for which that is not
    known; those that do not fit are left out."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in _GROUP), []).append(row)
    return [_best(group, group_rows) for group, group_rows in groups.items()]


def _best(group: tuple[Any, ...], rows: Sequence[Row]) -> BestPolicy:
    replayed = [row for row in rows if row["error"] is None]
    best = min(
        (row for row in replayed if row["fits"] is not False),
        key=lambda row: (not row["exact"], row["fits"] is None, row["iteration_ms"]),
        default=None,
    )
    baseline_ms = [
        row["iteration_ms"]
        for row in replayed
        if best and row["policy"] == BASELINE and row["subgroup_params"] == best["subgroup_params"]
    ]
    speed_up = baseline_ms[0] / best["iteration_ms"] if best and baseline_ms and best["iteration_ms"] else None
    return BestPolicy(**dict(zip(_GROUP, group, strict=True)), row=best, speed_up=speed_up)


@dataclass(frozen=True)
class Axis:
    """A column of the table that may be swept."""

    column: str
    label: str
    text: Callable[[Any], str]
    unit: str


AXES = (
    Axis("scale_params", "times the parameters", lambda value: f"{value:g}", " x parameters"),
    Axis("free_bytes", "device memory always free (GiB)", lambda value: f"{value / 2**30:.3g}", " GiB free"),
    Axis("subgroup_params", "parameters per subgroup", lambda value: count_text(value).replace(" ", ""), " a subgroup"),
    Axis("host_free_bytes", "free host memory (GiB)", lambda value: f"{value / 2**30:.3g}", " GiB of host memory"),
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
    """The panels of a picture: one row of panels per workload and scenario, one column per machine."""

    rows: Sequence[Row]
    axis: Axis | None  # Swept column that panels are drawn along; None if no scenario was swept.
    ticks: list[Any]
    panel_rows: list[PanelRow]
    machines: list[str]
    policies: list[str]

    @staticmethod
    def of(rows: Sequence[Row]) -> Grid:
        """Arrange the rows of a sweep. Raises UserError for more panels or policies than anybody can read."""
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


def sweep_view(rows: Sequence[Row], output: Path | None, print_all: bool) -> View:
    """Return the best policy of each workload, machine and scenario; with `print_all` all rows of a small sweep."""
    best = find_best(rows)
    yield _answer(best)
    # Names that are the same in all rows are a line above the table.
    constant = [name for name in ("workload", "machine") if len(_values(rows, name)) == 1]
    if constant:
        yield ", ".join(f"{name}: {getattr(best[0], name)}" for name in constant)

    def of_row(value: Callable[[Row], Any]) -> Callable[[BestPolicy], Any]:
        return lambda item: None if item.row is None else value(item.row)

    columns = [
        *_scenario_columns(rows),
        text("best policy", lambda item: "none fits" if item.row is None else _policy_text(item.row)),
        ms("iteration", of_row(itemgetter("iteration_ms"))),
        text("speed-up", lambda item: None if item.speed_up is None else f"{item.speed_up:.2f}x"),
        text("fits", of_row(lambda row: FITS_TEXTS[row["fits"]])),
        *(size(label, of_row(value)) for label, value in _BYTES.items()),
        share("above the bound", "above_bound", digits=1),
    ]
    title = f"The best policy that fits (speed-up over {BASELINE} with the same subgroups)"
    max_rows = _MAX_ROWS if print_all else _MAX_SHORT
    yield Table("best", title, columns, best, source=str(output or "--all"), max_rows=max_rows)
    if print_all:
        yield _all_rows(rows)
    errors = [str(row["error"]) for row in rows if row["error"]]
    if errors:
        yield f"{len(errors)} of {len(rows)} combinations cannot be replayed; the first: {errors[0]}"


def _answer(best: Sequence[BestPolicy]) -> str:
    """Return the line that says which policy to use, and where."""
    policies = Counter(item.row["policy"] for item in best if item.row)
    cases = "1 case" if len(best) == 1 else f"{len(best):,} cases"
    if not policies:
        return f"no policy fits ({cases})"
    none_fits = len(best) - policies.total()
    if len({(item.workload, item.scale_params, item.free_bytes, item.host_free_bytes) for item in best}) > 1:
        policy, number = policies.most_common(1)[0]
        rest = f"; none fits in {none_fits:,}" if none_fits else ""
        return Gain(f"{policy} is the best policy in {number:,} of {cases}{rest}")
    fastest = min((item for item in best if item.row), key=lambda item: float((item.row or {})["iteration_ms"]))
    assert fastest.row is not None
    gain = f" ({fastest.speed_up:.2f}x {BASELINE})" if fastest.speed_up is not None else ""
    of_cases = f", the fastest of {len(best)} machines" if len(best) > 1 else ""
    rest = f"; no policy fits on {none_fits}" if none_fits else ""
    time = f"{fastest.row['iteration_ms']:,.0f} ms an iteration{gain}"
    return Gain(f"{_policy_text(fastest.row)} on {fastest.machine}: {time}{of_cases}{rest}")


def _all_rows(rows: Sequence[Row]) -> Table:
    """Return the iteration, memory and traffic of storage of every combination."""
    keys: dict[str, tuple[str, Callable[[Any], str]]] = {
        "workload": ("workload", str),
        "machine": ("machine", str),
        "scale_params": ("parameters", lambda value: f"{value:g} x"),
        "free_bytes": ("always free", bytes_text),
        "subgroup_params": ("subgroup", count_text),
        "host_free_bytes": ("free host memory", bytes_text),
    }

    def scenario(key: str) -> Column:
        label, to_text = keys[key]
        return text(label, lambda row: to_text(row[key]))

    def figure(value: Callable[[Row], Any]) -> Callable[[Row], Any]:
        return lambda row: None if row["error"] else value(row)

    columns = [
        *(scenario(key) for key in keys if len({row[key] for row in rows}) > 1),
        text("policy", itemgetter("policy")),
        ms("iteration", figure(itemgetter("iteration_ms"))),
        *(size(label, figure(value)) for label, value in _BYTES.items()),
        text("fits", lambda row: "cannot be replayed" if row["error"] else FITS_TEXTS[row["fits"]]),
        text("exact", figure(lambda row: "yes" if row["exact"] else "no")),
    ]
    return Table("rows", "All combinations", columns, rows, max_rows=_MAX_ROWS)


def _policy_text(row: Row) -> str:
    return str(row["policy"]) if row["exact"] else f"{row['policy']} (not exact)"


def _scenario_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that tell the rows of best policies apart."""
    columns = {
        "workload": text("workload", "workload"),
        "machine": text("machine", "machine"),
        "scale_params": text(
            "parameters", lambda item: count_text(item.row["params"]) if item.row else f"{item.scale_params:g} x"
        ),
        "free_bytes": text(
            "always free", lambda item: bytes_text(item.row["least_free_bytes"] if item.row else item.free_bytes)
        ),
        "subgroup_params": text(
            "subgroup", lambda item: count_text(item.row["largest_subgroup_params"]) if item.row else None
        ),
        "host_free_bytes": text("free host memory", lambda item: bytes_text(item.host_free_bytes)),
    }
    return [column for name, column in columns.items() if len(_values(rows, name)) > 1]


def write_rows(rows: Sequence[Row], tasks: Sequence[Task], path: Path) -> None:
    """Write a table with a row per combination, with all workloads and machines as JSON in its metadata `ebbtide`."""
    metadata = {
        "version": ebbtide.__version__,
        "workloads": _distinct(tasks, "workload"),
        "machines": _distinct(tasks, "machine"),
    }
    schema = SCHEMA.with_metadata({"ebbtide": json.dumps(metadata)})
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd")


def _distinct(tasks: Sequence[Task], part: str) -> list[object]:
    return list({task[part]["name"]: task[part] for task in tasks}.values())
