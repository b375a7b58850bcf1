"""A picture of plans: memory, iteration, tokens per second and cost by machine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ebbtide.features.advise.job.training_job import TrainingJob
from ebbtide.features.advise.machine_plan import MachinePlan
from ebbtide.features.advise.ranges import Range
from ebbtide.features.advise.tables import digits_of, gib_text
from ebbtide.interleave.replay.pictures.policy_bars import FONT_SIZE, write_figure

matplotlib.use("Agg")

# Colours of Okabe and Ito, which differ for colour-blind readers and in grey print.
_DEVICE_COLOR, _HOST_COLOR, _TIME_COLOR, _RATE_COLOR, _COST_COLOR = (
    "#0072b2", "#e69f00", "#222222", "#009e73", "#cc79a7",
)  # fmt: skip
_CAPACITY_COLOR = "#e4e4e4"


class _Panel(NamedTuple):
    """A panel of ranges: its heading, the attribute of a plan, and its unit."""

    title: str
    attribute: str
    color: str
    scale: float = 1.0


_PANELS = (
    _Panel("iteration (s)", "iteration", _TIME_COLOR, 1e3),
    _Panel("tokens/s", "tokens_per_s", _RATE_COLOR),
    _Panel("cost of 1e9 tokens", "cost", _COST_COLOR),
)


def draw_plans(job: TrainingJob, plans: Sequence[MachinePlan]) -> Figure:
    """Draw plans, fastest machine first; machines that nothing helps come last."""
    ordered = sorted(plans, key=_likely_iteration)
    panels = [
        panel
        for panel in _PANELS
        if panel.attribute == "iteration"
        or any(getattr(plan, panel.attribute) is not None for plan in plans)
    ]
    widths = [1.25, 1.25, *[1.35] * len(panels)]
    figure = Figure(
        figsize=(2.6 + 2.1 * len(widths), 1.5 + 0.5 * len(plans)),
        layout="constrained",
        dpi=130,
    )
    axes: Any = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    rows = np.arange(len(ordered))
    _draw_memory(axes[0], rows, ordered, "device", _DEVICE_COLOR)
    _draw_memory(axes[1], rows, ordered, "host", _HOST_COLOR)
    for panel, target in zip(panels, axes[2:], strict=True):
        _draw_ranges(target, rows, ordered, panel)
    axes[0].set_yticks(rows, [_label(plan) for plan in ordered], fontsize=FONT_SIZE)
    axes[0].set_ylim(len(ordered) - 0.45, -0.55)
    for target in axes:
        target.spines[["top", "right", "left"]].set_visible(False)
        target.tick_params(axis="y", length=0)
        target.tick_params(axis="x", labelsize=7.5)
    figure.suptitle(f"{job.workload.name}: predicted", x=0.01, ha="left", fontsize=11)
    figure.supxlabel(
        "Memory of a rank; grey: what it has. Lines: ranges of 80 %; dashed: a guess, few known jobs are like it.", x=0.01, ha="left",
        fontsize=8, color="#555555",
    )  # fmt: skip
    return figure


def _likely_iteration(plan: MachinePlan) -> tuple[bool, float]:
    """Return the likely iteration, ms, after whether it is not known."""
    span = plan.iteration
    return span is None, 0.0 if span is None else span.likely


def _label(plan: MachinePlan) -> str:
    """Return the machine, the policy, and what else makes a job fit."""
    if plan.policy is None:
        return f"{plan.machine}\ndoes not fit"
    return f"{plan.machine}\n{', '.join([plan.policy, *(word for word in plan.changes_text() if word != 'offload')])}"


def _draw_memory(
    axes: Axes, rows: Any, plans: Sequence[MachinePlan], place: str, color: str
) -> None:
    capacities = [getattr(plan, f"{place}_capacity_bytes") or 0.0 for plan in plans]
    sizes = [getattr(plan, f"{place}_bytes") for plan in plans]
    most = max([*capacities, *(size or 0.0 for size in sizes), 2**30]) / 2**30
    axes.barh(rows, np.array(capacities) / 2**30, height=0.6, color=_CAPACITY_COLOR)
    axes.barh(rows, [(size or 0.0) / 2**30 for size in sizes], height=0.32, color=color)
    for row, size, capacity in zip(rows, sizes, capacities, strict=True):
        text = gib_text(size)
        if size is not None and capacity:
            text += f" of {gib_text(capacity)}"
        write_figure(axes, row, max(capacity, size or 0.0) / 2**30, text)
    axes.set_xlim(0, most * 1.6)
    axes.set_title(f"{place} memory (GiB)", fontsize=9, loc="left")


def _draw_ranges(
    axes: Axes, rows: Any, plans: Sequence[MachinePlan], panel: _Panel
) -> None:
    """Draw ranges on a logarithmic axis, since machines differ by factors."""
    highs = []
    for row, plan in zip(rows, plans, strict=True):
        span: Range | None = getattr(plan, panel.attribute)
        if span is None:
            continue
        likely, low, high = (value / panel.scale for value in span)
        axes.plot(
            [low, high],
            [row, row],
            color=panel.color,
            lw=3,
            alpha=0.45,
            solid_capstyle="butt",
            dash_capstyle="butt",
            linestyle=(0, (1, 1)) if plan.is_guess else "solid",
        )
        axes.plot([likely], [row], "o", color=panel.color, ms=5)
        write_figure(axes, row, high, f"{likely:,.{digits_of(likely)}f}")
        highs.append((low, high))
    axes.set_title(panel.title, fontsize=9, loc="left")
    if highs:
        axes.set_xscale("log")
        lowest, highest = min(low for low, _ in highs), max(high for _, high in highs)
        # Room for the text at the right end.
        axes.set_xlim(lowest / 1.15, highest * (highest / lowest) ** 0.3 * 1.3)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=5))
        axes.xaxis.set_major_formatter(
            FuncFormatter(
                lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            )
        )
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
