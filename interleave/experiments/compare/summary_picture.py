"""Draws the figures of each policy, measured above predicted: iteration, device and host memory, traffic of storage."""

from __future__ import annotations

from matplotlib.figure import SubFigure

from ebbtide.interleave.experiments.compare.results import ComparedBytes, ComparedPolicy
from ebbtide.interleave.replay.policy_bars import (
    FONT_SIZE,
    PolicyBar,
    byte_columns,
    draw_bytes,
    draw_iterations,
    legend_patches,
    time_limit_ms,
    width_ratios,
)
from ebbtide.phases import PHASES

# Distances between the two bars of a policy, and between policies.
_PAIR_STEP, _POLICY_STEP = 0.72, 1.75
# Height of a policy in inches.
POLICY_HEIGHT = 0.5


def draw_summary(figure: SubFigure, results: list[ComparedPolicy]) -> None:
    """Draw two bars per policy in each panel, and a legend below them."""
    bars = [bar for number, result in enumerate(results) for bar in _pair(result, number * _POLICY_STEP)]
    columns = byte_columns(bars)
    axes, *byte_axes = figure.subplots(
        1, 1 + len(columns), squeeze=False, sharey=True, width_ratios=width_ratios(columns)
    )[0]
    draw_iterations(axes, bars)
    axes.set_xlim(0, time_limit_ms(bars))
    axes.set_xlabel("median time of an iteration (ms)")
    axes.tick_params(axis="y", labelsize=FONT_SIZE, length=0)
    for panel, column in zip(byte_axes, columns, strict=True):
        draw_bytes(panel, column, bars)
    handles = legend_patches(bars)
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=FONT_SIZE)


def _pair(result: ComparedPolicy, position: float) -> list[PolicyBar]:
    remark = "" if result.is_exact else "LOSSES DIFFER"
    return [
        PolicyBar(
            name=f"{result.policy}  measured" if half == "measured" else "predicted",
            phases_ms={phase: getattr(result.times[phase], half) for phase in PHASES},
            **_bytes(result.memory, half),
            remark=remark if half == "measured" else "",
            is_faint=half == "predicted",
            position=position + (0.0 if half == "measured" else _PAIR_STEP),
            median_ms=getattr(result.times["iteration"], half),
        )
        for half in ("measured", "predicted")
    ]


def _bytes(memory: ComparedBytes, half: str) -> dict[str, float]:
    return {f"{name}_bytes": getattr(getattr(memory, name), half) for name in ("device", "host", "storage")}
