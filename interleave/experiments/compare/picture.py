"""Draws a comparison: the figures of each policy, and below them each operation on the lane of its resource."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch, Rectangle

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.advise.pictures import policy_bars
from ebbtide.interleave.advise.pictures.replay import OPERATION_EDGE, OPERATION_LOOKS, resource_lanes
from ebbtide.interleave.advise.replay import RESULT_BYTES
from ebbtide.interleave.experiments.compare.results import ComparedPolicy, Comparison
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.phases import PHASES

matplotlib.use("Agg")

_HALVES = ("measured", "predicted")
# The distance between the two halves in lanes, and heights in inches: a lane, and what else a policy has.
_HALF_DISTANCE = 0.6
_LANE_HEIGHT, _TITLE_HEIGHT = 0.16, 0.47
_END: dict[str, Any] = {"color": "#222222", "lw": 1.1, "ls": (0, (4, 2))}
_FONT = 8
# Phases beside the update are shaded behind the lanes.
_SHADES: dict[str, dict[str, Any]] = {
    "backward": {"facecolor": PHASE_COLORS["backward"], "alpha": 0.16},
    "forward": {"facecolor": PHASE_COLORS["forward"], "alpha": 0.16},
}
_SHADE_NAMES = {"backward": "backward before it", "forward": "next forward"}
# Distances between the two bars of a policy, and between policies.
_PAIR_STEP, _POLICY_STEP = 0.72, 1.75


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the figures of each policy, measured and predicted, and below them the lanes of its resources.

    Figures are the median iteration by phase, device and host memory, and the traffic of storage. The axis of the lanes
    is the time in ms from the start of the update; earlier operations are left of 0, and those that end in the next
    iteration right of the end of the update. Backward and next forward are shaded. All policies have the same scale."""
    results = comparison.results
    lanes = [resource_lanes(result.measured) for result in results]
    heights = [_TITLE_HEIGHT + _LANE_HEIGHT * (2 * len(names) + _HALF_DISTANCE) for names in lanes]
    parts = (0.95 + POLICY_HEIGHT * len(results), 0.95 + sum(heights))
    figure = Figure(figsize=(12.0, 0.35 + sum(parts)), layout="constrained", dpi=130)
    figure.set_label("ebbtide: policies, measured and predicted")
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=parts)[:, 0]
    draw_summary(top, results)
    _draw_schedules(bottom, results, lanes, heights)
    testbed = comparison.testbed
    device = "an emulated device: these times say nothing about a GPU" if testbed.emulated else testbed.name
    losses = "losses equal bit for bit" if comparison.losses_equal else "LOSSES DIFFER"
    figure.suptitle(
        f"{comparison.shape.params / 1e6:,.3g} M parameters on {device}; {losses}",
        x=0.01,
        ha="left",
        fontsize=10.5,
        parse_math=False,
    )
    return figure


def _draw_schedules(
    figure: SubFigure, results: Sequence[ComparedPolicy], lanes: Sequence[Sequence[str]], heights: Sequence[float]
) -> None:
    rows = figure.subplots(len(results), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, result, names in zip(rows, results, lanes, strict=True):
        _draw(axes, result, names)
    schedules = [schedule for result in results for schedule in (result.measured, result.predicted)]
    first = min(min((start for _, start in operation_starts_ms(schedule)), default=0.0) for schedule in schedules)
    last = max(map(_last_ms, schedules))
    left, right = min(first, 0.0) - 0.02 * last, 1.01 * last
    for axes, result, names in zip(rows, results, lanes, strict=True):
        _shade_phases(axes, result, len(names), left, right)
    rows[-1].set_xlim(left, right)
    rows[-1].set_xlabel("time from the start of the update (ms)")
    figure.legend(handles=_legend(schedules), loc="outside lower left", ncols=7, frameon=False, fontsize=_FONT)


def operation_starts_ms(schedule: Schedule) -> list[tuple[int, float]]:
    """Return (index, ms from the start of the update) of each drawn operation: all but clipping."""
    begin = schedule.iteration_s - schedule.update_s
    items = enumerate(schedule.items())
    return [(index, 1e3 * (start - begin)) for index, (op, start, _) in items if op.kind in OPERATION_LOOKS]


def _last_ms(schedule: Schedule) -> float:
    """Return when the update and all operations have ended, ms from the start of the update."""
    return 1e3 * (max(schedule.iteration_s, *schedule.ends) - schedule.iteration_s + schedule.update_s)


def _shade_phases(axes: Axes, result: ComparedPolicy, lanes: int, left: float, right: float) -> None:
    """Shade backward and next forward of each half, as far as they are within the axis."""
    for half, schedule in enumerate((result.measured, result.predicted)):
        top = half * (lanes + _HALF_DISTANCE) - 0.5
        update, forward, backward = (
            1e3 * seconds for seconds in (schedule.update_s, schedule.forward_s, schedule.backward_s)
        )
        # The job of a comparison has nothing between update and forward.
        spans = {"backward": (max(left, -backward), 0.0), "forward": (update, min(right, update + forward))}
        for phase, (begin, end) in spans.items():
            if end > begin:
                axes.add_patch(Rectangle((begin, top), end - begin, lanes, zorder=0, lw=0, **_SHADES[phase]))


def _draw(axes: Axes, result: ComparedPolicy, lanes: Sequence[str]) -> None:
    count = len(lanes)
    ticks: list[float] = []
    names: list[str] = []
    for half, schedule in enumerate((result.measured, result.predicted)):
        top = half * (count + _HALF_DISTANCE)
        for index, start in operation_starts_ms(schedule):
            op = schedule.plan.ops[index]
            length = 1e3 * (schedule.ends[index] - schedule.starts[index])
            lane = top + lanes.index(op.lane)
            axes.broken_barh([(start, length)], (lane - 0.42, 0.84), **OPERATION_LOOKS[op.kind], **OPERATION_EDGE)
        axes.vlines(1e3 * schedule.update_s, top - 0.5, top + count - 0.5, **_END)
        ticks += [top + lane for lane in range(count)]
        names += [lane.replace("_", " ") for lane in lanes]
        axes.text(
            -0.085, top + (count - 1) / 2, _HALVES[half], rotation=90, ha="center", va="center", fontsize=_FONT,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.axvline(0.0, color="#999999", lw=0.8)
    axes.set_yticks(ticks, names, fontsize=_FONT - 1)
    axes.set_ylim(2 * count + _HALF_DISTANCE - 0.5, -0.5)
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


# Height of a policy in inches.
POLICY_HEIGHT = 0.5


def draw_summary(figure: SubFigure, results: list[ComparedPolicy]) -> None:
    """Draw two bars per policy in each panel, and a legend below them."""
    bars = [bar for number, result in enumerate(results) for bar in _pair(result, number * _POLICY_STEP)]
    kinds = policy_bars.byte_kinds(bars)
    (panels,) = policy_bars.add_panels(figure, kinds)
    policy_bars.draw_row(panels, kinds, bars)
    panels[0].set_xlabel("median time of an iteration (ms)")
    panels[0].tick_params(axis="y", labelsize=_FONT + 0.5, length=0)
    policy_bars.add_legend(figure, bars)


def _pair(result: ComparedPolicy, position: float) -> list[policy_bars.PolicyBar]:
    remark = "" if result.is_exact else "LOSSES DIFFER"
    pairs = result.memory.device, result.memory.host, result.memory.storage
    return [
        policy_bars.PolicyBar(
            name=f"{result.policy}  measured" if half == "measured" else "predicted",
            phases_ms={phase: getattr(result.times[phase], half) for phase in PHASES},
            bytes_by_kind={kind: getattr(pair, half) for kind, pair in zip(RESULT_BYTES, pairs, strict=True)},
            remark=remark if half == "measured" else "",
            is_faint=half == "predicted",
            position=position + (0.0 if half == "measured" else _PAIR_STEP),
            median_ms=getattr(result.times["iteration"], half),
        )
        for half in ("measured", "predicted")
    ]
