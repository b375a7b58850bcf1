"""A picture of a replay: the iteration of each policy, phase by phase, the optimizer's
work, the bound, and the memory of each policy."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.interleave.model.kinds import find_kind
from ebbtide.interleave.model.operations import NO_OVERLAP, split_lane
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.pictures import policy_bars
from ebbtide.interleave.replay.replay import Replay
from ebbtide.phases import OTHER, PHASES

matplotlib.use("Agg")

# The strip below each bar where updates run, or state and parameters are copied for
# them.
_STRIP_COLOR, _STRIP_TOP, _STRIP_HEIGHT = "#1b5e20", 0.33, 0.09
# Hatched so that kinds differ in grey; copies of gradients and parameters are light, of
# state dark.
_OPERATION_LOOKS: dict[str, dict[str, Any]] = {
    "gradient down": {"facecolor": "#f6c58f", "hatch": ""},
    "gradient up": {"facecolor": "#f6c58f", "hatch": "xxxx"},
    "update": {"facecolor": "#7fbf7b", "hatch": ""},
    "cast": {"facecolor": "#d9f0d3", "hatch": "...."},
    "upload": {"facecolor": "#c6dbef", "hatch": "////"},
    "fetch": {"facecolor": "#2166ac", "hatch": ""},
    "flush": {"facecolor": "#b2182b", "hatch": "\\\\\\\\"},
    "read": {"facecolor": "#762a83", "hatch": ""},
    "write": {"facecolor": "#bf812d", "hatch": "\\\\\\\\"},
    "weights up": {"facecolor": "#4393c3", "hatch": "...."},
    "weights down": {"facecolor": "#92c5de", "hatch": "...."},
    "activation down": {"facecolor": "#c2a5cf", "hatch": ""},
    "activation up": {"facecolor": "#9970ab", "hatch": "////"},
    "layer gradient down": {"facecolor": "#f6c58f", "hatch": ""},
    "layer gradient up": {"facecolor": "#f6c58f", "hatch": "xxxx"},
}
# Device memory of a plan for layers, from below.
_MEMORY_LOOKS: dict[str, dict[str, Any]] = {
    "weights": {"facecolor": "#4393c3", "hatch": "...."},
    "gradients": {"facecolor": "#f6c58f", "hatch": ""},
    "activations": {"facecolor": "#9970ab", "hatch": "////"},
    "optimizer state": {"facecolor": "#b2182b", "hatch": "\\\\\\\\"},
}
_OPERATION_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
_OTHER_COLOR = "#d0d0d0"
_HALF_HEIGHT = 0.42
# Heights in inches: the memory of layers, a lane, and a title.
_MEMORY_HEIGHT, _LANE_HEIGHT, _TITLE_HEIGHT = 1.3, 0.22, 0.45
_FONT = 8
# Shorter operations, as a share of the axis, have no white edges.
_LEAST_EDGED_SHARE = 0.006


def chart(replay: Replay) -> Figure:
    """Draw the phases of each policy as bars, and bytes beside them.

    The bound with the overlap of all is a line. A strip below each bar shows updates,
    or copies; what is right of the bar runs under the next forward.
    """
    bars = [
        policy_bars.bar_of(vars(result), number)
        for number, result in enumerate(replay.results)
    ]
    kinds = policy_bars.byte_kinds(bars)
    figure = policy_bars.figure_for(kinds, 1.8 + 0.45 * len(bars))
    (panels,) = policy_bars.add_panels(figure, kinds)
    bound_ms = replay.overlap_bound.iteration_s * 1e3
    of_overlap = (
        "" if replay.overlap == NO_OVERLAP else f", overlap={replay.overlap.name}"
    )
    policy_bars.draw_row(
        panels, kinds, bars, bound_ms, f"bound{of_overlap}: {bound_ms:,.0f} ms"
    )
    last_ms = _draw_strips(panels[0], replay.schedules)
    panels[0].set_xlim(0, max(panels[0].get_xlim()[1], last_ms))
    panels[0].set_xlabel("time of an iteration (ms), simulated")
    figure.suptitle(
        f"{replay.workload.name} on {replay.machine.name}",
        x=0.01,
        ha="left",
        fontsize=10.5,
        parse_math=False,
    )
    strips = Patch(color=_STRIP_COLOR, label="updates, copies")
    policy_bars.add_legend(figure, bars, [strips, panels[0].lines[0]])
    return figure


def _draw_strips(axes: Axes, schedules: list[Schedule]) -> float:
    """Draw below each bar when updates and copies run.

    Return when the last of them ends, in ms.
    """
    last_ms = 0.0
    for row, schedule in enumerate(schedules):
        spans = _work_spans_ms(schedule)
        axes.broken_barh(
            spans, (row + _STRIP_TOP, _STRIP_HEIGHT), color=_STRIP_COLOR, lw=0
        )
        last_ms = max(last_ms, *(begin + length for begin, length in spans), 0.0)
    return last_ms


def _work_spans_ms(schedule: Schedule) -> list[tuple[float, float]]:
    """Return (start, length) in ms of the intervals of work.

    In these, updates, or copies of state or parameters, run.
    """
    spans: list[list[float]] = []
    for start, end in sorted(
        (start, end)
        for op, start, end in schedule.items()
        if find_kind(op.kind).may_be_late
    ):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    return [(1e3 * start, 1e3 * (end - start)) for start, end in spans]


def draw_schedules(schedules: Sequence[Schedule]) -> Figure:
    """Draw the lanes of all resources for each policy."""
    figure = Figure(
        figsize=(9.5, schedules_height(schedules)), layout="constrained", dpi=130
    )
    figure.set_label("ebbtide: simulated schedules")
    titles = [
        f"{schedule.plan.policy}: {schedule.iteration_s:,.3g} s"
        + (" where clipping changes nothing" if schedule.plan.speculated else "")
        + (f"; {schedule.note}" if schedule.note else "")
        for schedule in schedules
    ]
    shown = [schedule.shown for schedule in schedules]
    draw_lanes(figure, shown, titles).set_xlabel("time of an iteration (s), simulated")
    add_lane_legend(figure, shown)
    return figure


def schedules_height(schedules: Sequence[Schedule]) -> float:
    """Return the height that `draw_lanes` needs, in inches."""
    lanes = sum(
        _TITLE_HEIGHT + _LANE_HEIGHT * (len(resource_lanes(schedule)) + 1)
        for schedule in schedules
    )
    return (
        1.1
        + lanes
        + _MEMORY_HEIGHT
        * sum(bool(schedule.workload.layer_memory) for schedule in schedules)
    )


def draw_lanes(
    figure: Figure | SubFigure, schedules: Sequence[Schedule], titles: Sequence[str]
) -> Axes:
    """Draw the lanes of all resources in each schedule, in one scale, under the phases
    of the iteration. Return the last axes.

    Operations that end in the next iteration continue at the left; memory of plans for
    layers is above."""
    has_layers = [bool(schedule.workload.layer_memory) for schedule in schedules]
    ratios = [
        ratio
        for schedule, layers in zip(schedules, has_layers, strict=True)
        for ratio in (
            *[_MEMORY_HEIGHT / _LANE_HEIGHT] * layers,
            len(resource_lanes(schedule)) + 2.0,
        )
    ]
    grid = figure.subplots(
        len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios
    )
    rows: list[Axes] = list(grid[:, 0])
    longest_s = max(schedule.iteration_s for schedule in schedules)
    remaining = iter(rows)
    for schedule, title, layers in zip(schedules, titles, has_layers, strict=True):
        if layers:
            _draw_memory(next(remaining), schedule)
        axes = next(remaining)
        _draw(axes, schedule, _LEAST_EDGED_SHARE * longest_s)
        axes.set_title(title, loc="left", fontsize=9, parse_math=False)
    rows[-1].set_xlim(0.0, longest_s * 1.01)
    return rows[-1]


def add_lane_legend(figure: Figure | SubFigure, schedules: Sequence[Schedule]) -> None:
    """Add the legend of lanes, and of layers' device memory, below everything."""
    kinds = {op.kind for schedule in schedules for op in schedule.plan.ops}
    handles = [
        Patch(**looks, **_OPERATION_EDGE, label=kind)
        for kind, looks in _OPERATION_LOOKS.items()
        if kind in kinds
    ]
    memory = [
        _memory(schedule)[1] for schedule in schedules if schedule.workload.layer_memory
    ]
    names = [
        name
        for row, name in enumerate(_MEMORY_LOOKS)
        if any(sizes[row].any() for sizes in memory)
    ]
    handles += [Patch(**_MEMORY_LOOKS[name], label=f"memory: {name}") for name in names]
    columns = 5 if memory else 9
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=_FONT,
    )


def resource_lanes(schedule: Schedule) -> list[str]:
    """Return the names of all lanes from top to bottom.

    Lanes of features that the schedule does not use are left out.
    """
    others = {op.resource for op in schedule.plan.ops} - set(RESOURCES)
    return [*RESOURCES, *sorted(others, key=lambda lane: split_lane(lane)[::-1])]


def _memory(schedule: Schedule) -> tuple[Floats, Floats]:
    """Return instants, and the bytes from each on.

    There is a row for each kind of memory of `_MEMORY_LOOKS`.
    """
    times, memory = schedule.layer_memory_line()
    state_times, state = schedule.device_memory_line()
    instants = np.unique([*times, *state_times, schedule.iteration_s])
    of_layers = np.array([one[1:] for one in memory])[
        np.searchsorted(times, instants, "right") - 1
    ]
    of_state = state[np.searchsorted(state_times, instants, "right") - 1]
    return instants, np.array([*of_layers.T, of_state])


def _draw_memory(axes: Axes, schedule: Schedule) -> None:
    """Draw the device memory of layers and of the plan over an iteration, stacked."""
    instants, sizes = _memory(schedule)
    peak = float(np.sum(sizes, axis=0).max())
    unit, unit_bytes = ("GiB", 2**30) if peak >= 2**27 else ("MiB", 2**20)
    base = np.zeros(len(instants))
    for size, looks in zip(sizes, _MEMORY_LOOKS.values(), strict=True):
        axes.fill_between(
            instants, base, base + size / unit_bytes, step="post", lw=0, **looks
        )
        base = base + size / unit_bytes
    axes.set_ylim(0.0, 1.08 * peak / unit_bytes)
    axes.set_ylabel(unit, fontsize=_FONT - 1)
    axes.tick_params(axis="y", labelsize=_FONT - 1)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, schedule: Schedule, least_edged_s: float) -> None:
    names = ["phase", *resource_lanes(schedule)]
    colors = {OTHER: _OTHER_COLOR, **PHASE_COLORS}
    begin = 0.0
    for phase in (OTHER, *PHASES):
        length = float(getattr(schedule, f"{phase}_s"))
        axes.broken_barh(
            [(begin, length)],
            (-_HALF_HEIGHT, 2 * _HALF_HEIGHT),
            facecolor=colors[phase],
        )
        if length > 0.08 * schedule.iteration_s:
            axes.text(
                begin + length / 2,
                0.0,
                phase,
                ha="center",
                va="center",
                fontsize=_FONT - 1,
            )
        begin += length
    for op, start, end in schedule.items():
        if op.kind not in _OPERATION_LOOKS:
            continue
        lane = names.index(op.resource)
        spans = list(_in_iteration(start, end, schedule.iteration_s))
        looks = {**_OPERATION_LOOKS[op.kind], **_OPERATION_EDGE}
        if end - start < least_edged_s:
            # White edges and hatches would hide it.
            looks |= {"edgecolor": looks["facecolor"], "linewidth": 0.5, "hatch": ""}
        axes.broken_barh(
            spans, (lane - _HALF_HEIGHT, 2 * _HALF_HEIGHT), snap=False, **looks
        )
    axes.axvline(schedule.iteration_s, color="#222222", lw=1.1, ls=(0, (4, 2)))
    axes.set_yticks(
        range(len(names)),
        [name.replace("_", " ") for name in names],
        fontsize=_FONT - 1,
    )
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _in_iteration(
    start: float, end: float, length: float
) -> Iterator[tuple[float, float]]:
    """Yield (start, length) in seconds of an operation's parts in one iteration."""
    number = 0
    while end > number * length:
        first, last = max(start, number * length), min(end, (number + 1) * length)
        if last > first:
            yield first - number * length, last - first
        number += 1
