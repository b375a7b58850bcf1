"""Draws a sweep: one panel per machine and workload, and per scenario beyond the axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ebbtide.analysis.plot.text import plain_text, shorten_text
from ebbtide.interleave.experiments.sweep.bars import draw_bars
from ebbtide.interleave.experiments.sweep.grid import Axis, Grid
from ebbtide.interleave.experiments.sweep.panels import (
    BOUND,
    COMPUTE,
    FITS,
    ITERATION,
    byte_quantities,
    draw_lines,
    has_figures,
    scale_lines,
)
from ebbtide.interleave.experiments.sweep.task import Row

_NAME_SIZE = 10.0
# Widths of a character of the legend, and of a handle and the gap beside it.
_CHARACTER_POINTS, _HANDLE_CHARACTERS = 4.7, 8
# Height of a line of the legend, inches.
_LEGEND_LINE = 0.18


def check_panels(rows: Sequence[Row]) -> None:
    """Raise UserError for more panels or policies than anybody can read. Rows need no figures for that."""
    Grid.of(rows)


def draw_sweep(rows: Sequence[Row]) -> Figure:
    """Draw the iteration, device and host memory and traffic of storage of each policy.

    They are lines over the swept column with most values, or bars if none was swept.

    Raises:
        UserError: There are more panels or policies than anybody can read.
    """
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


def _write_message(axes: Axes, text: str) -> None:
    """Write into a panel that has nothing to draw why that is so."""
    style: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "transform": axes.transAxes,
        "fontsize": 8,
        "color": "#444444",
    }
    axes.text(0.5, 0.5, plain_text(text), wrap=True, parse_math=False, **style)
