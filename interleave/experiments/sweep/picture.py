"""Draws a sweep: one panel per machine and workload, and per scenario beyond the axis."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from ebbtide.analysis.plot.text import plain_text, shorten_text
from ebbtide.interleave.advise.pictures import policy_bars
from ebbtide.interleave.experiments.sweep.best import Axis, Grid
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.phases import OTHER, PHASES
from ebbtide.units import count_text

COMPUTE: dict[str, Any] = {"facecolor": "#d9d9d9", "edgecolor": "none"}
BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (1, 1.2))}
# Colours that colour-blind readers can distinguish, and lines and marks that differ in grey print.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#222222", "marker": "o", "ls": "solid"},
    {"color": "#d55e00", "marker": "s", "ls": (0, (6, 1.5))},
    {"color": "#0072b2", "marker": "^", "ls": (0, (4, 1, 1, 1))},
    {"color": "#009e73", "marker": "D", "ls": (0, (3, 1))},
    {"color": "#b0517f", "marker": "v", "ls": (0, (8, 1.5, 1, 1.5))},
    {"color": "#c98500", "marker": "P", "ls": (0, (2, 1))},
    {"color": "#56a0d3", "marker": "X", "ls": "solid"},
    {"color": "#777777", "marker": "*", "ls": (0, (6, 1.5))},
)

# Times that differ by more than this factor are drawn on a logarithmic scale.
_MAX_LINEAR_RATIO = 3.0

Points = Mapping[tuple[str, Any], Row]
# Widths of a character of the legend, and of a handle and the gap beside it.
_CHARACTER_POINTS, _HANDLE_CHARACTERS = 4.7, 8


class Quantity(NamedTuple):
    """A figure that panels of lines show: its label with the unit, its value in a row, and the relative height."""

    label: str
    value: Callable[[Row], float]
    height: float


ITERATION = Quantity("iteration (s)", lambda row: row["iteration_ms"] / 1e3, 2.4)
_BYTES = (
    Quantity("device\nmemory (GiB)", lambda row: row["peak_device_bytes"] / 2**30, 1.0),
    Quantity("host\nmemory (GiB)", lambda row: row["host_bytes"] / 2**30, 1.0),
    Quantity(
        "storage\ntraffic (GiB)", lambda row: (row["storage_read_bytes"] + row["storage_written_bytes"]) / 2**30, 1.0
    ),
)


@dataclass(frozen=True)
class FitStyle:
    """The style that shows whether a plan fits."""

    name: str
    filled: str

    def mark(self, color: str) -> dict[str, Any]:
        face = "white" if self.filled == "none" else color
        fill = "left" if self.filled == "left" else "full"
        return {"color": color, "mfc": face, "markerfacecoloralt": "white", "fillstyle": fill, "ls": "none", "ms": 6.5}

    def handle(self, axes: Axes) -> Artist:
        """Return the entry for the legend."""
        return axes.plot([], [], label=self.name, marker="o", **self.mark("#222222"))[0]


FITS = {
    True: FitStyle("fits", "all"),
    False: FitStyle("does not fit", "none"),
    None: FitStyle("fits: not known", "left"),
}


def byte_quantities(rows: Iterable[Row]) -> list[Quantity]:
    """Return what is drawn below the iterations: each kind of bytes that is not 0 in every row."""
    shown = [row for row in rows if row["error"] is None]
    return [quantity for quantity in _BYTES if any(map(quantity.value, shown))]


def draw_lines(axes: Axes, grid: Grid, points: Points, quantity: Quantity) -> None:
    """Draw a line per policy over the values of the swept axis, and behind iterations other time and the bound."""
    assert grid.axis is not None
    positions = np.arange(len(grid.ticks))
    if quantity is ITERATION:
        axes.fill_between(positions, _axis_values(grid, points, "compute_ms"), lw=0, **COMPUTE)
    for policy, style in zip(grid.policies, _STYLES, strict=False):
        rows = [points.get((policy, tick)) for tick in grid.ticks]
        values = np.array([quantity.value(row) if has_figures(row) else np.nan for row in rows])
        axes.plot(positions, values, lw=1.3, ms=0, color=style["color"], ls=style["ls"])
        for position, value, row in zip(positions, values, rows, strict=True):
            if has_figures(row):
                axes.plot(position, value, marker=style["marker"], **FITS[row["fits"]].mark(style["color"]))
        is_exact = all(row["exact"] for row in rows if has_figures(row))
        axes.plot([], [], label=policy if is_exact else f"{policy} (not exact)", lw=1.3, ms=6, **style)
    if quantity is ITERATION:
        bounds = [least_bound(points.get((policy, tick)) for policy in grid.policies) for tick in grid.ticks]
        axes.plot(positions, bounds, **BOUND)
    axes.set_xticks(
        positions, [grid.axis.text(tick) + _params_text(grid, points, tick) for tick in grid.ticks], fontsize=8.5
    )
    axes.set_xlim(-0.3, len(positions) - 0.7)


def scale_lines(row_axes: Sequence[Axes], axis: Axis, quantity: Quantity) -> None:
    """Give the panels of a row the same vertical axis from 0; that of times over the parameters is logarithmic."""
    low, high = min(axes.dataLim.minposy for axes in row_axes), max(axes.dataLim.y1 for axes in row_axes)
    for axes in row_axes:
        is_time = quantity is ITERATION
        if not is_time or axis.column != "scale_params" or not 0 < high < np.inf or high < _MAX_LINEAR_RATIO * low:
            axes.set_ylim(0, max(high, 0) * (1.05 if is_time else 1.15) or 1)
            continue
        axes.set_yscale("log")
        axes.set_ylim(low * 0.8, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def has_figures(row: Row | None) -> TypeGuard[Row]:
    """Return whether there is a row, and it has figures instead of an error."""
    return row is not None and row["error"] is None


def least_bound(rows: Iterable[Row | None]) -> float:
    """Return the bound in seconds of all of some rows: that with the widest overlap; NaN without any."""
    bounds = [seconds for row in rows if not np.isnan(seconds := _seconds(row, "bound_overlap_iteration_ms"))]
    return min(bounds, default=np.nan)


def _seconds(row: Row | None, column: str) -> float:
    """Return a figure in seconds; NaN if the row does not have it."""
    return row[column] / 1e3 if has_figures(row) else np.nan


def _axis_values(grid: Grid, points: Points, column: str) -> Sequence[float]:
    """Return a figure in seconds at each tick, of a column that is the same for every policy."""
    values = []
    for tick in grid.ticks:
        policy_seconds = (_seconds(points.get((policy, tick)), column) for policy in grid.policies)
        values.append(next((seconds for seconds in policy_seconds if not np.isnan(seconds)), np.nan))
    return values


def _params_text(grid: Grid, points: Points, tick: float) -> str:
    """Return the number of parameters at a tick of the `scale_params` axis; empty for other axes."""
    if grid.axis is None or grid.axis.column != "scale_params":
        return ""
    rows = (row for policy in grid.policies if has_figures(row := points.get((policy, tick))))
    return next((f"\n{count_text(row['params'])}" for row in rows), "")


_NAME_SIZE = 10.0
# Height of a line of the legend, inches.
_LEGEND_LINE = 0.18


def draw_sweep(rows: Sequence[Row]) -> Figure:
    """Draw iterations and bytes of each policy: as lines over the swept column with most values, or as bars without."""
    grid = Grid.of(rows)
    figure = draw_bars(grid) if grid.axis is None else _draw_lines(grid, grid.axis)
    figure.set_label(
        "ebbtide: sweep of " + ", ".join(dict.fromkeys(plain_text(panel_row.workload) for panel_row in grid.panel_rows))
    )
    return figure


def _draw_lines(grid: Grid, axis: Axis) -> Figure:
    """Draw a column of panels per machine: for each workload and scenario the iteration, and the bytes below it."""
    quantities = [ITERATION, *byte_quantities(grid.rows)]
    row_height = 2.6 + 1.1 * (len(quantities) - 1)
    size = (max(7.0, 0.9 + 3.6 * len(grid.machines)), 0.9 + row_height * len(grid.panel_rows))
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(
        len(grid.panel_rows) * len(quantities),
        len(grid.machines),
        squeeze=False,
        sharey="row",
        sharex=False,
        height_ratios=[quantity.height for quantity in quantities] * len(grid.panel_rows),
    )
    for number, panel_row in enumerate(grid.panel_rows):
        points = [grid.points(panel_row, machine) for machine in grid.machines]
        for quantity, row_axes in zip(quantities, all_axes[number * len(quantities) :], strict=False):
            for axes, machine_points in zip(row_axes, points, strict=True):
                draw_lines(axes, grid, machine_points, quantity)
                axes.tick_params(labelbottom=quantity is quantities[-1])
                axes.spines[["top", "right"]].set_visible(False)
                if quantity is ITERATION and not any(map(has_figures, machine_points.values())):
                    errors = (str(row["error"]) for row in machine_points.values())
                    _write_message(axes, next(errors, "not in the sweep"))
            scale_lines(row_axes, axis, quantity)
            row_axes[0].set_ylabel(quantity.label)
    for axes in all_axes[-1]:
        axes.set_xlabel(axis.label)
    figure.align_ylabels(all_axes[:, 0])
    _legend(figure, grid, all_axes[0, 0])
    _names(
        figure, grid, all_axes[:: len(quantities)], ITERATION.height / sum(quantity.height for quantity in quantities)
    )
    return figure


def _names(figure: Figure, grid: Grid, all_axes: Any, share: float) -> None:
    """Write machines above the columns and workloads at the left of the iterations, which have a share of a row."""
    for machine, axes in zip(grid.machines, all_axes[0], strict=True):
        text = shorten_text(figure, plain_text(machine), _NAME_SIZE, 3.3 * 72)
        axes.set_title(text, fontsize=_NAME_SIZE, parse_math=False)
    height = figure.get_size_inches()[1] * 72 / len(grid.panel_rows) * share - 50
    for panel_row, row_axes in zip(grid.panel_rows, all_axes, strict=True):
        text = shorten_text(figure, plain_text(panel_row.name), _NAME_SIZE, height)
        row_axes[0].set_ylabel(f"{text}\n{row_axes[0].get_ylabel()}".strip(), fontsize=_NAME_SIZE, parse_math=False)


def _legend(figure: Figure, grid: Grid, axes: Axes) -> None:
    handles: list[Artist] = list(axes.get_legend_handles_labels()[0])
    handles += [Patch(label="forward, backward and other", **COMPUTE), *axes.plot([], [], label="bound", **BOUND)]
    shown = {row["fits"] for row in grid.rows if row["error"] is None}
    handles += [FITS[fits].handle(axes) for fits in (True, False, None) if fits in shown]
    names = [plain_text(str(handle.get_label())) for handle in handles]
    columns = _column_count(names, figure.get_size_inches()[0] * 72 / _CHARACTER_POINTS)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _LEGEND_LINE * -(-len(names) // columns))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _column_count(names: Sequence[str], characters: float) -> int:
    """Return in how many columns, each as wide as its longest name, names fit into a width in characters."""
    for columns in range(min(len(names), 5), 1, -1):
        rows = -(-len(names) // columns)
        longest = [max(map(len, names[begin : begin + rows])) for begin in range(0, len(names), rows)]
        if sum(longest) + _HANDLE_CHARACTERS * len(longest) <= characters:
            return columns
    return 1


def _write_message(axes: Axes, text: str, x: float = 0.5, align: str = "center") -> None:
    """Write into a panel that has nothing to draw why that is so."""
    place: dict[str, Any] = {"ha": align, "va": "center", "transform": axes.transAxes}
    axes.text(x, 0.5, plain_text(text), wrap=True, parse_math=False, fontsize=8, color="#444444", **place)


def draw_bars(grid: Grid) -> Figure:
    """Draw a row of panels per workload and machine, of one scale per workload, and in it a bar per policy."""
    groups = [
        [(machine, grid.points(panel_row, machine)) for machine in grid.machines] for panel_row in grid.panel_rows
    ]
    all_bars = [
        [[_bar(policy, number, points) for number, policy in enumerate(grid.policies)] for _, points in group]
        for group in groups
    ]
    columns = policy_bars.byte_columns([bar for group in all_bars for bars in group for bar in bars])
    count = len(grid.panel_rows) * len(grid.machines)
    size = (policy_bars.figure_width(columns), 0.9 + (0.75 + 0.36 * len(grid.policies)) * count)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(count, 1 + len(columns), squeeze=False, width_ratios=policy_bars.width_ratios(columns))
    rows = iter(all_axes)
    for panel_row, group, group_bars in zip(grid.panel_rows, groups, all_bars, strict=True):
        flat = [bar for bars in group_bars for bar in bars]
        bounds_ms = [1e3 * least_bound(points.values()) for _, points in group]
        longest_bound = max((bound for bound in bounds_ms if not np.isnan(bound)), default=None)
        limit_ms = policy_bars.time_limit_ms(flat, longest_bound)
        for (machine, points), bars, bound_ms in zip(group, group_bars, bounds_ms, strict=True):
            axes, *byte_axes = next(rows)
            policy_bars.draw_iterations(axes, bars, None if np.isnan(bound_ms) else bound_ms, "bound")
            axes.set_xlim(0, limit_ms)
            axes.set_xlabel("")
            name = f"{plain_text(panel_row.name)} on {plain_text(machine)}"
            axes.set_title(
                shorten_text(figure, name, _NAME_SIZE, 5.5 * 72), fontsize=_NAME_SIZE, loc="left", parse_math=False
            )
            for panel, column in zip(byte_axes, columns, strict=True):
                policy_bars.draw_bytes(panel, column, bars, max(map(column.bytes_of, flat)))
                panel.set_ylim(axes.get_ylim())
            if not any(bar.phases_ms for bar in bars):
                _write_message(
                    axes, next((str(row["error"]) for row in points.values()), "not in the sweep"), 0.02, "left"
                )
    all_axes[-1][0].set_xlabel("time of an iteration (ms), simulated")
    lines: Sequence[Artist] = next((list(axes.lines) for axes in all_axes[:, 0] if axes.lines), [])
    handles = [*policy_bars.legend_patches([bar for group in all_bars for bars in group for bar in bars]), *lines]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=policy_bars.FONT_SIZE
    )
    return figure


def _bar(policy: str, number: int, points: Points) -> policy_bars.PolicyBar:
    row = points.get((policy, None))
    if not has_figures(row):
        is_alone = not any(map(has_figures, points.values()))
        return policy_bars.PolicyBar(policy, remark="" if is_alone else "no result", position=number)
    return policy_bars.PolicyBar(
        name=policy,
        phases_ms={phase: row[f"{phase}_ms"] for phase in (OTHER, *PHASES)},
        device_bytes=row["peak_device_bytes"],
        host_bytes=row["host_bytes"],
        storage_bytes=row["storage_read_bytes"] + row["storage_written_bytes"],
        remark=policy_bars.remark_of(row["fits"], row["exact"]),
        position=number,
    )
