"""Draws measured and predicted schedules: each operation on the lane of its resource."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.experiments.compare.results import ComparedPolicy, Comparison
from ebbtide.interleave.model.plan import RESOURCES
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.schedule_picture import OPERATION_EDGE, OPERATION_LOOKS

matplotlib.use("Agg")

_HALVES = ("measured", "predicted")
# Lanes of a half, and the distance between the two halves in lanes.
_LANES = len(RESOURCES)
_HALF_DISTANCE = 0.6
_END: dict[str, Any] = {"color": "#222222", "lw": 1.1, "ls": (0, (4, 2))}
_FONT = 8
# Phases beside the update are shaded behind the lanes.
_SHADES: dict[str, dict[str, Any]] = {
    "backward": {"facecolor": PHASE_COLORS["backward"], "alpha": 0.16},
    "forward": {"facecolor": PHASE_COLORS["forward"], "alpha": 0.16},
}
_SHADE_NAMES = {"backward": "backward before it", "forward": "next forward"}


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the lanes of the four resources for each policy, measured above predicted.

    The axis is the time in ms from the start of the update; earlier operations are left of 0, and those that end in the
    next iteration right of the end of the update. Backward and next forward are shaded. All policies have the same
    scale.
    """
    results = comparison.results
    figure = Figure(figsize=(9.5, 1.3 + 1.75 * len(results)), layout="constrained", dpi=130)
    figure.set_label("ebbtide: policies, measured and predicted")
    rows = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for axes, result in zip(rows, results, strict=True):
        _draw(axes, result)
    schedules = [schedule for result in results for schedule in (result.measured, result.predicted)]
    first = min(min((start for _, start in operation_starts_ms(schedule)), default=0.0) for schedule in schedules)
    last = max(map(_last_ms, schedules))
    left, right = min(first, 0.0) - 0.02 * last, 1.01 * last
    for axes, result in zip(rows, results, strict=True):
        _shade_phases(axes, result, left, right)
    rows[-1].set_xlim(left, right)
    rows[-1].set_xlabel("time from the start of the update (ms)")
    testbed = comparison.testbed
    device = "an emulated device: these times say nothing about a GPU" if testbed.emulated else testbed.name
    figure.suptitle(
        f"{comparison.shape.params / 1e6:,.3g} M parameters on {device}",
        x=0.01,
        ha="left",
        fontsize=10.5,
        parse_math=False,
    )
    figure.legend(handles=_legend(schedules), loc="outside lower center", ncols=6, frameon=False, fontsize=_FONT)
    return figure


def operation_starts_ms(schedule: Schedule) -> list[tuple[int, float]]:
    """Return (index, ms from the start of the update) of each drawn operation: all but clipping."""
    begin = schedule.iteration_s - schedule.update_s
    items = enumerate(schedule.items())
    return [(index, 1e3 * (start - begin)) for index, (op, start, _) in items if op.kind in OPERATION_LOOKS]


def _last_ms(schedule: Schedule) -> float:
    """Return when the update and all operations have ended, ms from the start of the update."""
    return 1e3 * (max(schedule.iteration_s, *schedule.ends) - schedule.iteration_s + schedule.update_s)


def _shade_phases(axes: Axes, result: ComparedPolicy, left: float, right: float) -> None:
    """Shade backward and next forward of each half, as far as they are within the axis."""
    for half, schedule in enumerate((result.measured, result.predicted)):
        top = half * (_LANES + _HALF_DISTANCE) - 0.5
        update, forward, backward = (
            1e3 * seconds for seconds in (schedule.update_s, schedule.forward_s, schedule.backward_s)
        )
        # The job of a comparison has nothing between update and forward.
        spans = {"backward": (max(left, -backward), 0.0), "forward": (update, min(right, update + forward))}
        for phase, (begin, end) in spans.items():
            if end > begin:
                axes.add_patch(Rectangle((begin, top), end - begin, _LANES, zorder=0, lw=0, **_SHADES[phase]))


def _draw(axes: Axes, result: ComparedPolicy) -> None:
    ticks: list[float] = []
    names: list[str] = []
    for half, schedule in enumerate((result.measured, result.predicted)):
        top = half * (_LANES + _HALF_DISTANCE)
        for index, start in operation_starts_ms(schedule):
            op = schedule.plan.ops[index]
            length = 1e3 * (schedule.ends[index] - schedule.starts[index])
            lane = top + RESOURCES.index(op.resource)
            axes.broken_barh([(start, length)], (lane - 0.42, 0.84), **OPERATION_LOOKS[op.kind], **OPERATION_EDGE)
        axes.vlines(1e3 * schedule.update_s, top - 0.5, top + _LANES - 0.5, **_END)
        ticks += [top + lane for lane in range(_LANES)]
        names += RESOURCES
        axes.text(
            -0.075, top + (_LANES - 1) / 2, _HALVES[half], rotation=90, ha="center", va="center", fontsize=_FONT,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.axvline(0.0, color="#999999", lw=0.8)
    axes.set_yticks(ticks, names, fontsize=_FONT - 1)
    axes.set_ylim(2 * _LANES + _HALF_DISTANCE - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(result), loc="left", fontsize=9, parse_math=False)


def _title(result: ComparedPolicy) -> str:
    plan = result.measured.plan
    what = "exposed" if plan.has_late_operations or plan.speculated else "update"
    pair = result.times[what]
    ratio = "" if pair.ratio is None else f", {pair.ratio:.2f} times as long"
    return f"{result.policy}: {what} measured {pair.measured:,.1f} ms, predicted {pair.predicted:,.1f} ms{ratio}"


def _legend(schedules: Sequence[Schedule]) -> list[Any]:
    kinds = {op.kind for schedule in schedules for op in schedule.plan.ops}
    patches = [Patch(**looks, **OPERATION_EDGE, label=kind) for kind, looks in OPERATION_LOOKS.items() if kind in kinds]
    patches += [Patch(**shade, label=_SHADE_NAMES[phase]) for phase, shade in _SHADES.items()]
    return [*patches, matplotlib.lines.Line2D([], [], **_END, label="end of the update")]
