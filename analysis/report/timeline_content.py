"""Collects the content of a rank's timeline: strips of boxes, panels of lines, windows,
and notes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.metrics.windows import Windows
from ebbtide.analysis.report.page_panels import (
    Lanes,
    page_lanes,
    page_panels,
    panel_notes,
)
from ebbtide.analysis.timeline.axis import BoxSampler, TimeAxis, recorded_interval
from ebbtide.analysis.timeline.boxes import (
    phase_boxes,
    recurring_boxes,
    substep_lanes,
    window_boxes,
)
from ebbtide.analysis.timeline.panels import TimelinePanel
from ebbtide.analysis.timeline.styles import OTHER_SUBSTEP, SUBSTEP_COLORS
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace
from ebbtide.units import NO_VALUE, NOT_KNOWN, bytes_text, ms_text


@dataclass(frozen=True)
class ChartBoxes:
    """Boxes of one colour."""

    left: Floats  # Left edges in the unit of the time axis.
    right: Floats  # Right edges.
    columns: dict[str, Any]  # Values per box for the tooltip, by name.


def phase_chart_boxes(rows: pd.DataFrame, axis: TimeAxis) -> dict[str, ChartBoxes]:
    """Return boxes of phases (`phase_boxes`) by the name of the phase.

    The name is the name of the colour, too.
    """
    by_phase = {}
    for phase in PHASES:
        boxes = rows[rows["phase"] == phase]
        columns = {
            "iteration": [
                "not finished" if pd.isna(number) else str(number)
                for number in boxes["iteration"]
            ],
            "micro_step": boxes["micro_step"].to_numpy(np.int32),
            "ms": _lengths_ms(boxes),
        }
        by_phase[phase] = _chart_boxes(boxes, axis, columns)
    return by_phase


def substep_chart_boxes(rows: pd.DataFrame, axis: TimeAxis) -> dict[str, ChartBoxes]:
    """Return boxes of sub-steps (`substep_lanes`) by colour.

    A nested one is drawn after the one around it.
    """
    color = rows["name"].map(SUBSTEP_COLORS).fillna(OTHER_SUBSTEP)
    by_color = {}
    for name in (OTHER_SUBSTEP, *dict.fromkeys(SUBSTEP_COLORS.values())):
        boxes = rows[color == name]
        if boxes.empty:
            continue
        columns = {
            "op": list(boxes["name"]),
            "on": list(boxes["resource"]),
            "subgroup": [
                NO_VALUE if number < 0 else str(number) for number in boxes["subgroup"]
            ],
            "bytes": [
                NO_VALUE if pd.isna(size) else bytes_text(int(size))
                for size in boxes["bytes"]
            ],
            "ms": _lengths_ms(boxes),
        }
        by_color[name] = _chart_boxes(boxes, axis, columns)
    return by_color


def window_chart_boxes(
    rows: pd.DataFrame, axis: TimeAxis, level_bytes: float, size: float
) -> ChartBoxes:
    """Return boxes of windows (`window_boxes`) in the unit of a panel.

    Each goes from the peak of its memory (column `bottom`) up to the level. The unit is
    `size` bytes.
    """
    columns = {
        "bottom": ((level_bytes - rows["free_bytes"].to_numpy()) / size).astype(
            np.float32
        ),
        "phase": [phase or "the whole trace" for phase in rows["phase"]],
        "iteration": [
            NO_VALUE if pd.isna(number) else str(int(number))
            for number in rows["iteration"]
        ],
        "span": [
            f"{ms_text(s)} to {ms_text(e)}"
            for s, e in zip(rows["start_ms"], rows["end_ms"], strict=True)
        ],
        "length": [ms_text(length) for length in rows["end_ms"] - rows["start_ms"]],
        "free": [bytes_text(int(free_bytes)) for free_bytes in rows["free_bytes"]],
        "h2d": [_percent(share) for share in rows["h2d_idle_share"]],
        "d2h": [_percent(share) for share in rows["d2h_idle_share"]],
    }
    return _chart_boxes(rows, axis, columns)


def _chart_boxes(
    rows: pd.DataFrame, axis: TimeAxis, columns: dict[str, Any]
) -> ChartBoxes:
    left, right = (
        axis.x(rows[column].to_numpy(np.int64)) for column in ("start_ns", "end_ns")
    )
    return ChartBoxes(left, right, columns)


def _lengths_ms(rows: pd.DataFrame) -> Floats:
    return np.asarray(
        (rows["end_ns"] - rows["start_ns"]).to_numpy(np.int64) / 1e6, np.float32
    )


def _percent(share: float) -> str:
    return NOT_KNOWN if np.isnan(share) else f"{100 * share:.0f} %"


def _tooltip(title: str, **rows: str) -> str:
    lines = "".join(
        f'<div style="color:var(--muted)">{label}</div><div '
        f'style="text-align:right">{text}</div>'
        for label, text in rows.items()
    )
    grid = (
        '<div style="display:grid;grid-template-columns:auto '
        f'auto;column-gap:14px">{lines}</div>'
    )
    return f'<div style="font-weight:600">{title}</div>{grid}'


PHASE_TOOLTIP = _tooltip(
    "$name",
    **{
        "iteration": "@iteration",
        "micro-step": "@micro_step",
        "length": "@ms{0,0.00} ms",
    },
)
SUBSTEP_TOOLTIP = _tooltip(
    "@op", on="@on", subgroup="@subgroup", bytes="@bytes", length="@ms{0,0.00} ms"
)
RECURRING_TOOLTIP = _tooltip(
    "free in every iteration", **{"phase": "@phase", "at least": "@free"}
)
WINDOW_TOOLTIP = _tooltip(
    "window: @phase",
    **{
        "iteration": "@iteration",
        "within it": "@span",
        "length": "@length",
        "least free": "@free",
        "h2d idle": "@h2d",
        "d2h idle": "@d2h",
    },
)


class IterationLabel(NamedTuple):
    """The number of an iteration, with its start and end in the unit of the time
    axis."""

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Strip:
    """A row of boxes above the panels."""

    name: str  # Label of the row.
    boxes: dict[str, ChartBoxes]  # Boxes by colour.
    tooltip: str  # Template of what hovering shows.


@dataclass(frozen=True)
class TimelineContent:
    """Everything that a timeline shows; it has at least one strip, panel or lane."""

    # The time axis. 0 is the start of the first iteration, or of the trace where it has
    # none.
    axis: TimeAxis
    # Start and end of what is shown at first, ns: the iterations.
    initial: tuple[int, int]
    strips: Sequence[Strip]  # Rows of boxes, from the top.
    # Lanes of the GPU's activity, below the strips; none where kernels were not
    # recorded.
    lanes: Lanes
    panels: Sequence[TimelinePanel]  # Panels of lines, from the top.
    iterations: Sequence[IterationLabel]  # Numbers of iterations.
    # Windows of free memory, boxes of the first panel; None where there are none.
    windows: ChartBoxes | None
    notes: Sequence[str]  # Remarks on what is drawn, and how.


class DetailLimits(NamedTuple):
    """Limits on what the page shows of a rank: points of all lines, boxes of each kind,
    and rows of each table."""

    points: int
    boxes: int
    rows: int


def timeline_content(
    trace: Trace, rank: int, windows: Windows | None, limits: DetailLimits
) -> TimelineContent | None:
    """Collect what a rank's timeline shows; None where nothing was recorded. `windows`
    None: unknown."""
    recorded = recorded_interval(trace, rank)
    if recorded is None:
        return None
    spans = intervals(trace, rank, device_times=False).spans
    starts, ends = (
        spans[column].to_numpy(np.int64) for column in ("start_ns", "end_ns")
    )
    initial = (int(starts.min()), int(ends.max())) if len(spans) else recorded
    if len(spans) and is_predicted(trace):
        # Without loading.
        initial = int(trace.phases(rank)["start_ns"].min()), initial[1]
    start, end = recorded[0], max(recorded[1], recorded[0] + 1)
    axis = TimeAxis(initial[0], start, end, end - start)
    panels = page_panels(trace, rank, axis, limits.points)
    lanes, lane_notes = page_lanes(trace, rank, axis, limits.points)
    sampler = BoxSampler(
        starts, _box_count(trace, rank, windows, len(starts)), limits.boxes
    )
    of_substeps = BoxSampler(starts, len(trace.ops(rank)), limits.boxes)
    strips = list(_strips(trace, rank, axis, windows, sampler, of_substeps))
    if not strips and not panels and not lanes:
        return None
    drawn = None
    if (
        panels
        and panels[0].level is not None
        and windows is not None
        and windows.windows
    ):
        rows = sampler.sample(window_boxes(trace, rank, windows.windows))
        drawn = window_chart_boxes(rows, axis, panels[0].level, panels[0].scale.size)
    labels = zip(
        map(int, spans["iteration"]),
        map(float, axis.x(starts)),
        map(float, axis.x(ends)),
        strict=True,
    )
    return TimelineContent(
        axis=axis,
        initial=initial,
        strips=strips,
        lanes=lanes,
        panels=panels,
        iterations=[IterationLabel(*label) for label in labels],
        windows=drawn,
        notes=[
            *lane_notes,
            *(note for panel in panels for note in panel_notes(panel)),
            *_box_notes(sampler, of_substeps),
        ],
    )


def _box_count(
    trace: Trace, rank: int, windows: Windows | None, iterations: int
) -> int:
    """Return the number of boxes of the most frequent kind, besides sub-steps."""
    counts = [len(trace.phases(rank)) * (2 if _has_gpu_times(trace, rank) else 1)]
    if windows is not None:
        counts += [len(windows.windows), len(windows.guaranteed) * iterations]
    return max(counts)


def _has_gpu_times(trace: Trace, rank: int) -> bool:
    return bool(trace.phases(rank)["gpu_start_ns"].notna().any())


def _strips(
    trace: Trace,
    rank: int,
    axis: TimeAxis,
    windows: Windows | None,
    sampler: BoxSampler,
    of_substeps: BoxSampler,
) -> Iterator[Strip]:
    names = {
        "phases": len(trace.phases(rank)) > 0,
        "on GPU": _has_gpu_times(trace, rank) and not is_predicted(trace),
    }
    for name in (name for name, is_recorded in names.items() if is_recorded):
        boxes = sampler.sample(phase_boxes(trace, rank, name == "on GPU"))
        yield Strip(name, phase_chart_boxes(boxes, axis), PHASE_TOOLTIP)
    for name, rows in substep_lanes(trace, rank):
        yield Strip(
            name, substep_chart_boxes(of_substeps.sample(rows), axis), SUBSTEP_TOOLTIP
        )
    if windows is not None and windows.guaranteed:
        boxes = sampler.sample(recurring_boxes(trace, rank, windows.min_bytes))
        columns = {
            "phase": list(boxes["phase"]),
            "free": [bytes_text(int(size)) for size in boxes["free_bytes"]],
        }
        yield Strip(
            "always free",
            {"recurring": _chart_boxes(boxes, axis, columns)},
            RECURRING_TOOLTIP,
        )


def _box_notes(sampler: BoxSampler, of_substeps: BoxSampler) -> Iterator[str]:
    if sampler.stride > 1:
        yield f"phases and windows of one iteration in {sampler.stride} are drawn"
    if sampler.dropped:
        yield f"the {sampler.dropped:,} shortest phases and windows are not drawn"
    if of_substeps.stride > 1 or of_substeps.dropped:
        yield "not all sub-steps are drawn (`ebbtide export` has all)"
