"""Draws a sweep over nothing but policies, workloads and machines: bars as those of `ebbtide replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbtide.analysis.plot.text import plain_text, shorten_text
from ebbtide.interleave.experiments.sweep.grid import Grid
from ebbtide.interleave.experiments.sweep.panels import Points, has_figures, least_bound
from ebbtide.interleave.replay.policy_bars import (
    FONT_SIZE,
    PolicyBar,
    byte_columns,
    draw_bytes,
    draw_iterations,
    figure_width,
    legend_patches,
    remark_of,
    time_limit_ms,
    width_ratios,
)
from ebbtide.phases import OTHER, PHASES

_NAME_SIZE = 10.0
_REASON: dict[str, Any] = {"fontsize": 8, "color": "#444444", "wrap": True, "parse_math": False, "va": "center"}


def draw_bars(grid: Grid) -> Figure:
    """Draw a row of panels per workload and machine, and in it a bar per policy.

    All machines of a workload have the same scale.
    """
    groups = [
        [(machine, grid.points(panel_row, machine)) for machine in grid.machines] for panel_row in grid.panel_rows
    ]
    all_bars = [[_bars(grid, points) for _, points in group] for group in groups]
    columns = byte_columns([bar for group in all_bars for bars in group for bar in bars])
    count = len(grid.panel_rows) * len(grid.machines)
    size = (figure_width(columns), 0.9 + (0.75 + 0.36 * len(grid.policies)) * count)
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(count, 1 + len(columns), squeeze=False, width_ratios=width_ratios(columns))
    rows = iter(all_axes)
    for panel_row, group, group_bars in zip(grid.panel_rows, groups, all_bars, strict=True):
        flat = [bar for bars in group_bars for bar in bars]
        bounds_ms = [1e3 * least_bound(points.values()) for _, points in group]
        longest_bound = max((bound for bound in bounds_ms if not np.isnan(bound)), default=None)
        limit_ms = time_limit_ms(flat, longest_bound)
        for (machine, points), bars, bound_ms in zip(group, group_bars, bounds_ms, strict=True):
            axes, *byte_axes = next(rows)
            draw_iterations(axes, bars, None if np.isnan(bound_ms) else bound_ms, "bound")
            axes.set_xlim(0, limit_ms)
            axes.set_xlabel("")
            name = f"{plain_text(panel_row.name)} on {plain_text(machine)}"
            axes.set_title(
                shorten_text(figure, name, _NAME_SIZE, 5.5 * 72), fontsize=_NAME_SIZE, loc="left", parse_math=False
            )
            for panel, column in zip(byte_axes, columns, strict=True):
                draw_bytes(panel, column, bars, max(map(column.bytes_of, flat)))
                panel.set_ylim(axes.get_ylim())
            if not any(bar.phases_ms for bar in bars):
                reason = next((str(row["error"]) for row in points.values()), "not in the sweep")
                _write_reason(axes, reason)
    all_axes[-1][0].set_xlabel("time of an iteration (ms), simulated")
    lines: Sequence[Artist] = next((list(axes.lines) for axes in all_axes[:, 0] if axes.lines), [])
    handles = [*legend_patches([bar for group in all_bars for bars in group for bar in bars]), *lines]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=FONT_SIZE)
    return figure


def _bars(grid: Grid, points: Points) -> list[PolicyBar]:
    return [_bar(policy, number, points) for number, policy in enumerate(grid.policies)]


def _bar(policy: str, number: int, points: Points) -> PolicyBar:
    row = points.get((policy, None))
    if not has_figures(row):
        is_alone = not any(map(has_figures, points.values()))
        return PolicyBar(policy, remark="" if is_alone else "no result", position=number)
    return PolicyBar(
        name=policy,
        phases_ms={phase: row[f"{phase}_ms"] for phase in (OTHER, *PHASES)},
        device_bytes=row["peak_device_bytes"],
        host_bytes=row["host_bytes"],
        storage_bytes=row["storage_read_bytes"] + row["storage_written_bytes"],
        remark=remark_of(row["fits"], row["exact"]),
        position=number,
    )


def _write_reason(axes: Axes, text: str) -> None:
    """Write into a panel that has nothing to draw why that is so."""
    axes.text(0.02, 0.5, plain_text(text), transform=axes.transAxes, **_REASON)
