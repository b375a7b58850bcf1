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
from ebbtide.interleave.experiments.sweep.grid import Grid
from ebbtide.interleave.experiments.sweep.panels import (
    BOUND,
    COMPUTE,
    FITS,
    draw_bars,
    draw_lines,
    scale_bars,
    scale_lines,
)
from ebbtide.interleave.experiments.sweep.task import Row

_NAME_SIZE = 10.0


def check_panels(rows: Sequence[Row]) -> None:
    """Raise UserError for more panels or policies than anybody can read. Rows need no figures for that."""
    Grid.of(rows)


def draw_sweep(rows: Sequence[Row]) -> Figure:
    """Draw the iteration time of each policy over the swept column with most values, or as bars if none was swept.

    Raises:
        UserError: There are more panels or policies than anybody can read.
    """
    grid = Grid.of(rows)
    row_height = 3.1 if grid.axis else 0.7 + 0.32 * len(grid.policies)
    size = (max(7.0, 0.9 + 3.6 * len(grid.machines)), 1.3 + row_height * len(grid.panel_rows))
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    figure.set_label(
        "ebbtide: sweep of " + ", ".join(dict.fromkeys(plain_text(panel_row.workload) for panel_row in grid.panel_rows))
    )
    all_axes = figure.subplots(len(grid.panel_rows), len(grid.machines), squeeze=False, sharey="row")
    for panel_row, row_axes in zip(grid.panel_rows, all_axes, strict=True):
        for machine, axes in zip(grid.machines, row_axes, strict=True):
            points = grid.points(panel_row, machine)
            if grid.axis:
                draw_lines(axes, grid, points)
            else:
                draw_bars(axes, grid, points)
            axes.spines[["top", "right"]].set_visible(False)
            if not any(row["error"] is None for row in points.values()):
                _write_message(axes, next((str(row["error"]) for row in points.values()), "not in the sweep"))
        if grid.axis:
            scale_lines(row_axes, grid.axis)
            row_axes[0].set_ylabel("iteration (s)")
        else:
            scale_bars(row_axes)
    for axes in all_axes[-1]:
        axes.set_xlabel(grid.axis.label if grid.axis else "iteration (s); GB: device + host memory")
    _legend(figure, grid, all_axes[0, 0])
    _names(figure, grid, all_axes)
    return figure


def _names(figure: Figure, grid: Grid, all_axes: Any) -> None:
    """Write machines above the columns and workloads at the left of the rows."""
    for machine, axes in zip(grid.machines, all_axes[0], strict=True):
        text = shorten_text(figure, plain_text(machine), _NAME_SIZE, 3.3 * 72)
        axes.set_title(text, fontsize=_NAME_SIZE, parse_math=False)
    height = figure.get_size_inches()[1] * 72 / len(grid.panel_rows) - 60
    for panel_row, row_axes in zip(grid.panel_rows, all_axes, strict=True):
        text = shorten_text(figure, plain_text(panel_row.name), _NAME_SIZE, height)
        row_axes[0].set_ylabel(f"{text}\n{row_axes[0].get_ylabel()}".strip(), fontsize=_NAME_SIZE, parse_math=False)


def _legend(figure: Figure, grid: Grid, axes: Axes) -> None:
    handles: list[Artist] = [handle for handle in axes.get_legend_handles_labels()[0] if grid.axis]
    handles += [Patch(label="forward, backward and other", **COMPUTE), *axes.plot([], [], label="bound", **BOUND)]
    shown = {row["fits"] for row in grid.rows if row["error"] is None}
    handles += [FITS[fits].handle(axes, bool(grid.axis)) for fits in (True, False, None) if fits in shown]
    names = [plain_text(str(handle.get_label())) for handle in handles]
    columns = min(len(handles), 3 if len(grid.machines) < 3 else 5)
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)


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
