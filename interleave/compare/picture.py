"""Draws the figures of each compared policy, and each operation on its lane.

A lane belongs to a resource.
"""

from typing import Any

import matplotlib
from matplotlib.figure import Figure, SubFigure

from ebbtide.interleave.compare.results import ComparedPolicy, Comparison
from ebbtide.interleave.replay.pictures import policy_bars
from ebbtide.interleave.replay.pictures.replay import (
    add_lane_legend,
    draw_lanes,
    schedules_height,
)
from ebbtide.interleave.replay.replay import RESULT_BYTES
from ebbtide.phases import PHASES

matplotlib.use("Agg")

# Height of a policy in inches.
_POLICY_HEIGHT = 0.5
EMULATED = "an emulated device: these times say nothing about a GPU"
TITLE: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 10.5, "parse_math": False}


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw each policy's medians by phase, memory and storage, measured and predicted,
    above its lanes."""
    results = comparison.results
    schedules = [
        schedule
        for result in results
        for schedule in (result.measured, result.predicted)
    ]
    parts = (0.95 + _POLICY_HEIGHT * len(results), schedules_height(schedules))
    figure = Figure(figsize=(12.0, 0.35 + sum(parts)), layout="constrained", dpi=130)
    figure.set_label("ebbtide: policies, measured and predicted")
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=parts)[:, 0]
    _draw_figures(top, results)
    titles = [title for result in results for title in (_title(result), "predicted")]
    draw_lanes(bottom, schedules, titles).set_xlabel("time of an iteration (s)")
    add_lane_legend(bottom, schedules)
    device = EMULATED if comparison.testbed.emulated else comparison.testbed.name
    losses = "losses equal bit for bit" if comparison.losses_equal else "LOSSES DIFFER"
    figure.suptitle(
        f"{comparison.shape.params / 1e6:,.3g} M parameters on {device}; {losses}",
        **TITLE,
    )
    return figure


def _title(result: ComparedPolicy) -> str:
    plan = result.measured.plan
    what = "exposed" if plan.has_late_operations or plan.speculated else "update"
    pair = result.times[what]
    ratio = "" if pair.ratio is None else f", {pair.ratio:.2f} times as long"
    return (
        f"{result.policy}: {what} measured {pair.measured:,.1f} ms, predicted "
        f"{pair.predicted:,.1f} ms{ratio}"
    )


def _draw_figures(figure: SubFigure, results: list[ComparedPolicy]) -> None:
    """Draw two bars per policy in each panel, and a legend below them."""
    bars = [
        bar
        for number, result in enumerate(results)
        for bar in _pair(result, number * policy_bars.POLICY_STEP)
    ]
    policy_bars.draw_medians(figure, bars)


def _pair(result: ComparedPolicy, position: float) -> list[policy_bars.PolicyBar]:
    remark = "" if result.is_exact else "LOSSES DIFFER"
    pairs = result.memory.device, result.memory.host, result.memory.storage
    return [
        policy_bars.PolicyBar(
            name=f"{result.policy}  measured" if half == "measured" else "predicted",
            phases_ms={phase: getattr(result.times[phase], half) for phase in PHASES},
            bytes_by_kind={
                kind: getattr(pair, half)
                for kind, pair in zip(RESULT_BYTES, pairs, strict=True)
            },
            remark=remark if half == "measured" else "",
            is_faint=half == "predicted",
            position=position + (0.0 if half == "measured" else policy_bars.PAIR_STEP),
            median_ms=getattr(result.times["iteration"], half),
        )
        for half in ("measured", "predicted")
    ]
