"""A picture of a replay: the iteration of each policy, phase by phase, when the optimizer works, the bound,
and the memory that it needs."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ebbtide.interleave.model.overlap import NO_OVERLAP
from ebbtide.interleave.model.plan import LATE_KINDS
from ebbtide.interleave.model.schedule import Schedule
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
from ebbtide.interleave.replay.results import Replay
from ebbtide.phases import OTHER, PHASES

matplotlib.use("Agg")

# The strip below each bar where updates run, or state and parameters are copied for them.
_STRIP_COLOR, _STRIP_TOP, _STRIP_HEIGHT = "#1b5e20", 0.33, 0.09


def chart(replay: Replay) -> Figure:
    """Draw the phases of each policy as bars, in the order requested, the bound as a line, and bytes beside them.

    Policies that do not fit, or are not known to fit, and those that are not exact, are labelled. A strip below each
    bar shows when updates, or copies of state and parameters, run; what is right of the bar runs under the next
    forward. The bound is that with the overlap of all policies.
    """
    bars = [
        PolicyBar(
            name=result.policy,
            phases_ms={phase: getattr(result, f"{phase}_ms") for phase in (OTHER, *PHASES)},
            device_bytes=result.peak_device_bytes,
            host_bytes=result.host_bytes,
            storage_bytes=result.storage_read_bytes + result.storage_written_bytes,
            remark=remark_of(result.fits, result.exact),
            position=number,
        )
        for number, result in enumerate(replay.results)
    ]
    columns = byte_columns(bars)
    figure = Figure(figsize=(figure_width(columns), 1.8 + 0.45 * len(bars)), layout="constrained", dpi=130)
    ratios = width_ratios(columns)
    all_axes = figure.subplots(1, len(ratios), squeeze=False, sharey=True, width_ratios=ratios)[0]
    bound_ms = replay.overlap_bound.iteration_s * 1e3
    of_overlap = "" if replay.overlap == NO_OVERLAP else f", overlap={replay.overlap.name}"
    draw_iterations(all_axes[0], bars, bound_ms, f"bound{of_overlap}: {bound_ms:,.0f} ms")
    last_ms = _draw_strips(all_axes[0], replay.schedules)
    all_axes[0].set_xlim(0, max(time_limit_ms(bars, bound_ms), last_ms))
    all_axes[0].set_xlabel("time of an iteration (ms), simulated")
    for axes, column in zip(all_axes[1:], columns, strict=True):
        draw_bytes(axes, column, bars)
    figure.suptitle(
        f"{replay.workload.name} on {replay.machine.name}", x=0.01, ha="left", fontsize=10.5, parse_math=False
    )
    handles = [*legend_patches(bars), Patch(color=_STRIP_COLOR, label="updates, copies"), all_axes[0].lines[0]]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=FONT_SIZE)
    return figure


def _draw_strips(axes: Axes, schedules: list[Schedule]) -> float:
    """Draw below each bar when updates and copies run, and return when the last of them ends, in ms."""
    last_ms = 0.0
    for row, schedule in enumerate(schedules):
        spans = _work_spans_ms(schedule)
        axes.broken_barh(spans, (row + _STRIP_TOP, _STRIP_HEIGHT), color=_STRIP_COLOR, lw=0)
        last_ms = max(last_ms, *(begin + length for begin, length in spans), 0.0)
    return last_ms


def _work_spans_ms(schedule: Schedule) -> list[tuple[float, float]]:
    """Return (start, length) in ms of the intervals in which updates, or copies of state or parameters, run."""
    spans: list[list[float]] = []
    for start, end in sorted((start, end) for op, start, end in schedule.items() if op.kind in LATE_KINDS):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    return [(1e3 * start, 1e3 * (end - start)) for start, end in spans]
