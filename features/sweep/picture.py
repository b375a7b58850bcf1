"""Draws a sweep, with one panel per machine and workload, and per scenario beyond the
axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ebbtide.analysis.plot.text import plain_text, shorten_text
from ebbtide.errors import UserError
from ebbtide.features.sweep.best import values_of
from ebbtide.features.sweep.task import Row
from ebbtide.interleave.replay.pictures import policy_bars
from ebbtide.units import count_text

_MAX_PANELS = 24
_MAX_MACHINES = 6
# Bars have names, lines only styles to be told apart.
_MAX_BARS, _MAX_LINES = 24, 8
_BOUND: dict[str, Any] = {"color": "#222222", "lw": 1.2, "ls": (0, (1, 1.2))}
# Colours that colour-blind readers can distinguish, and lines and marks that differ in
# grey print.
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
# The mark of a plan that does not fit, or is not known to.
_EMPTY: dict[str, Any] = {"markerfacecolor": "white"}
# Widths of a character of the legend, and of a handle and the gap beside it.
_CHARACTER_POINTS, _HANDLE_CHARACTERS = 4.7, 8
_NAME_SIZE = 10.0
# Heights of panels and of a line of the legend, inches.
_PANEL_HEIGHT, _LEGEND_LINE = 2.6, 0.18


@dataclass(frozen=True)
class Axis:
    """A column that may be swept: its label as an axis, the text of a value, and what
    follows that in names."""

    column: str
    label: str
    text: Callable[[Any], str]
    unit: str


_AXES = (
    Axis(
        "scale_params",
        "times the parameters",
        lambda value: f"{value:g}",
        " x parameters",
    ),
    Axis(
        "free_bytes",
        "device memory always free (GiB)",
        lambda value: f"{value / 2**30:.3g}",
        " GiB free",
    ),
    Axis(
        "subgroup_params",
        "parameters per subgroup",
        lambda value: count_text(value).replace(" ", ""),
        " a subgroup",
    ),
    Axis(
        "host_free_bytes",
        "free host memory (GiB)",
        lambda value: f"{value / 2**30:.3g}",
        " GiB of host memory",
    ),
)


@dataclass(frozen=True)
class Grid:
    """The panels of a picture: a row per workload and scenario, a column per
    machine."""

    # Swept column that panels are drawn along; None if no scenario was swept.
    axis: Axis | None
    ticks: list[Any]
    panel_rows: dict[str, list[list[Row]]]  # By name: the rows of each machine.
    machines: list[str]
    policies: list[str]

    @staticmethod
    def of(rows: Sequence[Row]) -> Grid:
        """Arrange the rows of a sweep. Raises UserError for more panels or policies
        than anybody can read."""
        swept = {
            axis: values
            for axis in _AXES
            if len(values := values_of(rows, axis.column)) > 1
        }
        axis = max(swept, key=lambda axis: len(swept[axis]), default=None)
        machines, policies = values_of(rows, "machine"), values_of(rows, "policy")
        panel_rows: dict[str, list[list[Row]]] = {}
        for row in rows:
            others = [
                f"{other.text(row[other.column])}{other.unit}"
                for other in swept
                if other is not axis
            ]
            panels = panel_rows.setdefault(
                ", ".join([row["workload"], *others]), [[] for _ in machines]
            )
            panels[machines.index(row["machine"])].append(row)
        if (
            len(panel_rows) * len(machines) > _MAX_PANELS
            or len(machines) > _MAX_MACHINES
        ):
            raise UserError(
                f"--plot would need {len(panel_rows)} rows of {len(machines)} panels, "
                "more than "
                f"{_MAX_PANELS} in all or {_MAX_MACHINES} in a row: draw a smaller "
                "sweep, or leave --plot out"
            )
        most, kind = (_MAX_LINES, "lines") if axis else (_MAX_BARS, "bars")
        if len(policies) > most:
            raise UserError(
                f"--plot shows at most {most} policies as {kind}: draw fewer, or leave "
                "--plot out"
            )
        return Grid(
            axis, sorted(swept[axis]) if axis else [], panel_rows, machines, policies
        )


def draw_sweep(rows: Sequence[Row]) -> Figure:
    """Draw iterations as lines over the swept column with most values.

    Without one, draw iterations and bytes as bars.
    """
    grid = Grid.of(rows)
    figure = _draw_bars(grid) if grid.axis is None else _draw_lines(grid, grid.axis)
    figure.set_label(
        "ebbtide: sweep of " + ", ".join(map(plain_text, values_of(rows, "workload")))
    )
    return figure


def _with_figures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["error"] is None]


def _draw_lines(grid: Grid, axis: Axis) -> Figure:
    """Draw a column of panels per machine with the iterations of each workload and
    scenario, in one scale."""
    size = (
        max(7.0, 0.9 + 3.6 * len(grid.machines)),
        0.9 + _PANEL_HEIGHT * len(grid.panel_rows),
    )
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(
        len(grid.panel_rows), len(grid.machines), squeeze=False, sharey="row"
    )
    for (name, panels), row_axes in zip(grid.panel_rows.items(), all_axes, strict=True):
        for axes, rows in zip(row_axes, panels, strict=True):
            _draw_panel(axes, grid, axis, rows)
        text = shorten_text(
            figure, plain_text(name), _NAME_SIZE, 0.8 * _PANEL_HEIGHT * 72
        )
        row_axes[0].set_ylabel(
            f"{text}\niteration (s)", fontsize=_NAME_SIZE, parse_math=False
        )
        if axis.column == "scale_params":
            row_axes[0].set_yscale("log")
            row_axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            row_axes[0].yaxis.set_major_formatter("{x:g}")
            row_axes[0].yaxis.set_minor_formatter("")
        else:
            row_axes[0].set_ylim(bottom=0)
    for machine, first, last in zip(
        grid.machines, all_axes[0], all_axes[-1], strict=True
    ):
        text = shorten_text(figure, plain_text(machine), _NAME_SIZE, 3.3 * 72)
        first.set_title(text, fontsize=_NAME_SIZE, parse_math=False)
        last.set_xlabel(axis.label)
    _add_legend(figure, all_axes[0, 0])
    return figure


def _draw_panel(axes: Axes, grid: Grid, axis: Axis, rows: Sequence[Row]) -> None:
    """Draw the iterations of each policy over the swept axis, and the bound."""
    shown = _with_figures(rows)
    if not shown:
        _write_message(axes, rows)
    position = {tick: number for number, tick in enumerate(grid.ticks)}
    for policy, style in zip(grid.policies, _STYLES, strict=False):
        own = sorted(
            (row for row in shown if row["policy"] == policy),
            key=itemgetter(axis.column),
        )
        name = policy if all(row["exact"] for row in own) else f"{policy} (not exact)"
        places, times = (
            [position[row[axis.column]] for row in own],
            [row["iteration_ms"] / 1e3 for row in own],
        )
        axes.plot(places, times, label=name, lw=1.3, ms=6, **style)
        misfits = [number for number, row in enumerate(own) if row["fits"] is not True]
        if misfits:
            axes.plot(
                places,
                times,
                markevery=misfits,
                ms=6,
                **{**style, **_EMPTY, "ls": "none"},
            )
    bounds: dict[int, float] = {}
    for row in shown:
        place, bound_s = (
            position[row[axis.column]],
            row["bound_overlap_iteration_ms"] / 1e3,
        )
        bounds[place] = min(bound_s, bounds.get(place, bound_s))
    axes.plot(
        sorted(bounds),
        [bounds[place] for place in sorted(bounds)],
        label="bound",
        **_BOUND,
    )
    params = {row["scale_params"]: f"\n{count_text(row['params'])}" for row in shown}
    texts = [
        axis.text(tick)
        + (params.get(tick, "") if axis.column == "scale_params" else "")
        for tick in grid.ticks
    ]
    axes.set_xticks(range(len(texts)), texts, fontsize=8.5)
    axes.set_xlim(-0.3, len(texts) - 0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below all panels, for which the figure becomes higher."""
    handles, names = axes.get_legend_handles_labels()
    handles += axes.plot([], [], ls="none", marker="o", ms=6, color="#222222", **_EMPTY)
    names = [*map(plain_text, names), "does not fit, or is not known to"]
    width, height = figure.get_size_inches()
    characters = max(map(len, names)) + _HANDLE_CHARACTERS
    columns = max(
        1, min(5, len(names), int(width * 72 / _CHARACTER_POINTS / characters))
    )
    figure.set_size_inches(width, height + _LEGEND_LINE * -(-len(names) // columns))
    legend = figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _write_message(
    axes: Axes, rows: Sequence[Row], x: float = 0.5, align: str = "center"
) -> None:
    """Write into a panel that has nothing to draw why that is so."""
    text = plain_text(next((str(row["error"]) for row in rows), "not in the sweep"))
    place: dict[str, Any] = {"ha": align, "va": "center", "transform": axes.transAxes}
    axes.text(
        x, 0.5, text, wrap=True, parse_math=False, fontsize=8, color="#444444", **place
    )


def _draw_bars(grid: Grid) -> Figure:
    """Draw a row of panels per workload and machine, with a bar per policy.

    There is one scale per workload.
    """
    groups = [
        [_bars(grid.policies, rows) for rows in panels]
        for panels in grid.panel_rows.values()
    ]
    all_bars = [bar for group in groups for bars in group for bar in bars]
    kinds = policy_bars.byte_kinds(all_bars)
    count = len(grid.panel_rows) * len(grid.machines)
    figure = policy_bars.figure_for(
        kinds, 0.9 + (0.75 + 0.36 * len(grid.policies)) * count
    )
    FigureCanvasAgg(figure)
    all_axes = policy_bars.add_panels(figure, kinds, count)
    remaining = iter(all_axes)
    for (name, panels), group in zip(grid.panel_rows.items(), groups, strict=True):
        of_group = [bar for bars in group for bar in bars]
        drawn = []
        for machine, rows, bars in zip(grid.machines, panels, group, strict=True):
            axes, *_ = row_axes = next(remaining)
            bound_ms = min(
                (row["bound_overlap_iteration_ms"] for row in _with_figures(rows)),
                default=None,
            )
            policy_bars.draw_row(row_axes, kinds, bars, bound_ms, "bound", of_group)
            title = shorten_text(
                figure,
                f"{plain_text(name)} on {plain_text(machine)}",
                _NAME_SIZE,
                5.5 * 72,
            )
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
    """Return a bar per policy.

    One without a result says so, unless no policy has one.
    """
    shown = {row["policy"]: row for row in _with_figures(rows)}
    remark = "no result" if shown else ""
    return [
        policy_bars.bar_of(shown[policy], number)
        if policy in shown
        else policy_bars.PolicyBar(policy, remark=remark, position=number)
        for number, policy in enumerate(policies)
    ]
