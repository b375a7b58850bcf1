"""Draws a sweep: one panel per machine and workload, and per scenario beyond the axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from ebbtide.analysis.plot.text import plain_text, shorten_text
from ebbtide.errors import UserError
from ebbtide.interleave.advise.pictures import policy_bars
from ebbtide.interleave.advise.replay import RESULT_BYTES
from ebbtide.interleave.experiments.sweep.best import values_of
from ebbtide.interleave.experiments.sweep.task import Row
from ebbtide.units import count_text

_MAX_PANELS = 24
_MAX_MACHINES = 6
# Bars have names, lines only styles to be told apart.
_MAX_BARS, _MAX_LINES = 24, 8
_COMPUTE: dict[str, Any] = {"facecolor": "#d9d9d9", "edgecolor": "none"}
_BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (1, 1.2))}
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
# Marks of plans that fit, do not, and are not known to.
_FITS: dict[bool | None, tuple[str, dict[str, Any]]] = {
    True: ("fits", {}),
    False: ("does not fit", {"mfc": "white"}),
    None: ("fits: not known", {"fillstyle": "left", "markerfacecoloralt": "white"}),
}
_MARK: dict[str, Any] = {"ls": "none", "ms": 6.5}
# Times that differ by more than this factor are drawn on a logarithmic scale.
_MAX_LINEAR_RATIO = 3.0
# Widths of a character of the legend, and of a handle and the gap beside it.
_CHARACTER_POINTS, _HANDLE_CHARACTERS = 4.7, 8
_NAME_SIZE = 10.0
# Height of a line of the legend, inches.
_LEGEND_LINE = 0.18
_ITERATION = "iteration (s)"


def _in_gib(bytes_of: Callable[[Any], float]) -> Callable[[Row], float]:
    return lambda row: bytes_of(row) / 2**30


# The figures that panels of lines show, by their labels: that of a row, and the relative height of its panel.
_QUANTITIES: dict[str, tuple[Callable[[Row], float], float]] = {
    _ITERATION: (lambda row: row["iteration_ms"] / 1e3, 2.4),
    **{f"{kind.replace(' ', chr(10))} (GiB)": (_in_gib(bytes_of), 1.0) for kind, bytes_of in RESULT_BYTES.items()},
}


@dataclass(frozen=True)
class Axis:
    """A column that may be swept: its label as an axis, the text of a value, and what follows that in names."""

    column: str
    label: str
    text: Callable[[Any], str]
    unit: str


_AXES = (
    Axis("scale_params", "times the parameters", lambda value: f"{value:g}", " x parameters"),
    Axis("free_bytes", "device memory always free (GiB)", lambda value: f"{value / 2**30:.3g}", " GiB free"),
    Axis("subgroup_params", "parameters per subgroup", lambda value: count_text(value).replace(" ", ""), " a subgroup"),
    Axis("host_free_bytes", "free host memory (GiB)", lambda value: f"{value / 2**30:.3g}", " GiB of host memory"),
)


@dataclass(frozen=True)
class Grid:
    """The panels of a picture: one row of panels per workload and scenario, one column per machine."""

    axis: Axis | None  # Swept column that panels are drawn along; None if no scenario was swept.
    ticks: list[Any]
    panel_rows: dict[str, list[list[Row]]]  # By name: the rows of each machine.
    machines: list[str]
    policies: list[str]

    @staticmethod
    def of(rows: Sequence[Row]) -> Grid:
        """Arrange the rows of a sweep. Raises UserError for more panels or policies than anybody can read."""
        swept = {axis: values for axis in _AXES if len(values := values_of(rows, axis.column)) > 1}
        axis = max(swept, key=lambda axis: len(swept[axis]), default=None)
        machines, policies = values_of(rows, "machine"), values_of(rows, "policy")
        panel_rows: dict[str, list[list[Row]]] = {}
        for row in rows:
            others = [f"{other.text(row[other.column])}{other.unit}" for other in swept if other is not axis]
            panels = panel_rows.setdefault(", ".join([row["workload"], *others]), [[] for _ in machines])
            panels[machines.index(row["machine"])].append(row)
        if len(panel_rows) * len(machines) > _MAX_PANELS or len(machines) > _MAX_MACHINES:
            raise UserError(
                f"--plot would need {len(panel_rows)} rows of {len(machines)} panels, more than "
                f"{_MAX_PANELS} in all or {_MAX_MACHINES} in a row: draw a smaller sweep, or leave --plot out"
            )
        most, kind = (_MAX_LINES, "lines") if axis else (_MAX_BARS, "bars")
        if len(policies) > most:
            raise UserError(f"--plot shows at most {most} policies as {kind}: draw fewer, or leave --plot out")
        return Grid(axis, sorted(swept[axis]) if axis else [], panel_rows, machines, policies)


def draw_sweep(rows: Sequence[Row]) -> Figure:
    """Draw iterations and bytes of each policy: as lines over the swept column with most values, or as bars without."""
    grid = Grid.of(rows)
    figure = _draw_bars(grid) if grid.axis is None else _draw_lines(grid, grid.axis, _with_figures(rows))
    figure.set_label("ebbtide: sweep of " + ", ".join(map(plain_text, values_of(rows, "workload"))))
    return figure


def _with_figures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["error"] is None]


def _draw_lines(grid: Grid, axis: Axis, shown: Sequence[Row]) -> Figure:
    """Draw a column of panels per machine: for each workload and scenario the iteration, and the bytes below it."""
    labels = [label for label, (value, _) in _QUANTITIES.items() if label == _ITERATION or any(map(value, shown))]
    heights = [_QUANTITIES[label][1] for label in labels]
    row_height = 2.6 + 1.1 * (len(labels) - 1)
    size = (max(7.0, 0.9 + 3.6 * len(grid.machines)), 0.9 + row_height * len(grid.panel_rows))
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(
        len(grid.panel_rows) * len(labels),
        len(grid.machines),
        squeeze=False,
        sharey="row",
        height_ratios=heights * len(grid.panel_rows),
    )
    # Room for the name of a row beside its iterations, in points.
    name_height = row_height * 72 * heights[0] / sum(heights) - 50
    for number, (name, panels) in enumerate(grid.panel_rows.items()):
        block = all_axes[number * len(labels) : (number + 1) * len(labels)]
        for label, row_axes in zip(labels, block, strict=True):
            for axes, rows in zip(row_axes, panels, strict=True):
                _draw_panel(axes, grid, axis, rows, label)
                axes.tick_params(labelbottom=label is labels[-1])
            _scale(row_axes, axis, label)
            row_axes[0].set_ylabel(label)
        text = shorten_text(figure, plain_text(name), _NAME_SIZE, name_height)
        block[0, 0].set_ylabel(f"{text}\n{_ITERATION}", fontsize=_NAME_SIZE, parse_math=False)
    for machine, first, last in zip(grid.machines, all_axes[0], all_axes[-1], strict=True):
        first.set_title(
            shorten_text(figure, plain_text(machine), _NAME_SIZE, 3.3 * 72), fontsize=_NAME_SIZE, parse_math=False
        )
        last.set_xlabel(axis.label)
    figure.align_ylabels(all_axes[:, 0])
    _add_legend(figure, all_axes[0, 0], {row["fits"] for row in shown})
    return figure


def _draw_panel(axes: Axes, grid: Grid, axis: Axis, rows: Sequence[Row], label: str) -> None:
    """Draw a line per policy over the values of the swept axis, and behind iterations other time and the bound."""
    shown = sorted(_with_figures(rows), key=itemgetter(axis.column))
    value, _ = _QUANTITIES[label]
    positions = np.arange(len(grid.ticks))

    def least(figure: Callable[[Row], float], rows: Sequence[Row] = shown) -> list[float]:
        """Return the least figure of rows at each tick; NaN where there is none."""
        at_tick = [[figure(row) for row in rows if row[axis.column] == tick] for tick in grid.ticks]
        return [min(figures, default=np.nan) for figures in at_tick]

    if label == _ITERATION:
        axes.fill_between(positions, least(lambda row: row["compute_ms"] / 1e3), lw=0, **_COMPUTE)
        if not shown:
            _write_message(axes, rows)
    for policy, style in zip(grid.policies, _STYLES, strict=False):
        own = [row for row in shown if row["policy"] == policy]
        axes.plot(positions, least(value, own), lw=1.3, ms=0, color=style["color"], ls=style["ls"])
        for row in own:
            mark = {"marker": style["marker"], "color": style["color"], **_MARK, **_FITS[row["fits"]][1]}
            axes.plot(grid.ticks.index(row[axis.column]), value(row), **mark)
        name = policy if all(row["exact"] for row in own) else f"{policy} (not exact)"
        axes.plot([], [], label=name, lw=1.3, ms=6, **style)
    if label == _ITERATION:
        axes.plot(positions, least(lambda row: row["bound_overlap_iteration_ms"] / 1e3), **_BOUND)
    texts = [axis.text(tick) for tick in grid.ticks]
    if axis.column == "scale_params":
        params = {row[axis.column]: f"\n{count_text(row['params'])}" for row in shown}
        texts = [text + params.get(tick, "") for text, tick in zip(texts, grid.ticks, strict=True)]
    axes.set_xticks(positions, texts, fontsize=8.5)
    axes.set_xlim(-0.3, len(positions) - 0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(row_axes: Sequence[Axes], axis: Axis, label: str) -> None:
    """Give the panels of a row the same vertical axis from 0; that of times over the parameters is logarithmic."""
    low, high = min(axes.dataLim.minposy for axes in row_axes), max(axes.dataLim.y1 for axes in row_axes)
    is_time = label == _ITERATION
    first = row_axes[0]
    if not is_time or axis.column != "scale_params" or not 0 < high < np.inf or high < _MAX_LINEAR_RATIO * low:
        first.set_ylim(0, max(high, 0) * (1.05 if is_time else 1.15) or 1)
        return
    first.set_yscale("log")
    first.set_ylim(low * 0.8, high * 1.15)
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter("{x:g}")
    first.yaxis.set_minor_formatter("")


def _add_legend(figure: Figure, axes: Axes, fits: set[bool | None]) -> None:
    """Add a legend below all panels, for which the figure becomes higher."""
    handles: list[Artist] = list(axes.get_legend_handles_labels()[0])
    handles += [Patch(label="forward, backward and other", **_COMPUTE), *axes.plot([], [], label="bound", **_BOUND)]
    for key, (name, style) in _FITS.items():
        if key in fits:
            handles += axes.plot([], [], label=name, marker="o", color="#222222", **_MARK, **style)
    names = [plain_text(str(handle.get_label())) for handle in handles]
    width, height = figure.get_size_inches()
    characters = max(map(len, names)) + _HANDLE_CHARACTERS
    columns = max(1, min(5, len(names), int(width * 72 / _CHARACTER_POINTS / characters)))
    figure.set_size_inches(width, height + _LEGEND_LINE * -(-len(names) // columns))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _write_message(axes: Axes, rows: Sequence[Row], x: float = 0.5, align: str = "center") -> None:
    """Write into a panel that has nothing to draw why that is so."""
    text = plain_text(next((str(row["error"]) for row in rows), "not in the sweep"))
    place: dict[str, Any] = {"ha": align, "va": "center", "transform": axes.transAxes}
    axes.text(x, 0.5, text, wrap=True, parse_math=False, fontsize=8, color="#444444", **place)


def _draw_bars(grid: Grid) -> Figure:
    """Draw a row of panels per workload and machine, of one scale per workload, and in it a bar per policy."""
    groups = [[_bars(grid.policies, rows) for rows in panels] for panels in grid.panel_rows.values()]
    all_bars = [bar for group in groups for bars in group for bar in bars]
    kinds = policy_bars.byte_kinds(all_bars)
    count = len(grid.panel_rows) * len(grid.machines)
    figure = policy_bars.figure_for(kinds, 0.9 + (0.75 + 0.36 * len(grid.policies)) * count)
    FigureCanvasAgg(figure)
    all_axes = policy_bars.add_panels(figure, kinds, count)
    remaining = iter(all_axes)
    for (name, panels), group in zip(grid.panel_rows.items(), groups, strict=True):
        of_group = [bar for bars in group for bar in bars]
        drawn = []
        for machine, rows, bars in zip(grid.machines, panels, group, strict=True):
            axes, *_ = row_axes = next(remaining)
            bound_ms = min((row["bound_overlap_iteration_ms"] for row in _with_figures(rows)), default=None)
            policy_bars.draw_row(row_axes, kinds, bars, bound_ms, "bound", of_group)
            title = shorten_text(figure, f"{plain_text(name)} on {plain_text(machine)}", _NAME_SIZE, 5.5 * 72)
            axes.set_title(title, fontsize=_NAME_SIZE, loc="left", parse_math=False)
            if bound_ms is None:
                _write_message(axes, rows, 0.02, "left")
            drawn.append(axes)
        limit_ms = max(axes.get_xlim()[1] for axes in drawn)
        for axes in drawn:
            axes.set_xlim(0, limit_ms)
    all_axes[-1][0].set_xlabel("time of an iteration (ms), simulated")
    bounds = next((list(axes.lines) for axes in all_axes[:, 0] if axes.lines), [])
    policy_bars.add_legend(figure, all_bars, bounds)
    return figure


def _bars(policies: Sequence[str], rows: Sequence[Row]) -> list[policy_bars.PolicyBar]:
    """Return a bar per policy; one without a result says so, unless no policy has one."""
    shown = {row["policy"]: row for row in _with_figures(rows)}
    remark = "no result" if shown else ""
    return [
        policy_bars.bar_of(shown[policy], number)
        if policy in shown
        else policy_bars.PolicyBar(policy, remark=remark, position=number)
        for number, policy in enumerate(policies)
    ]
