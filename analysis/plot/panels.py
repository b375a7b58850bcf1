"""The panels of a figure.

Also the interval of a trace that they show, and the scale that panels of one name
share.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.timeline.axis import TimeAxis, recorded_interval
from ebbtide.analysis.timeline.boxes import clip_boxes, has_gpu_times, phase_boxes
from ebbtide.analysis.timeline.panels import (
    Scale,
    TimelinePanel,
    TimelineStack,
    value_scale,
)
from ebbtide.analysis.timeline.styles import (
    COLORS,
    LEVEL,
    PHASE_COLORS,
    PHASE_OPACITY,
    BoxStyle,
    LineStyle,
)
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

# Text and borders between iterations.
TEXT_COLOR, NOTE_COLOR, BORDER_COLOR, OUTLINE_COLOR = (
    "#222222",
    "#444444",
    "#999999",
    "#777777",
)

_HATCHES = {
    "rising": "////",
    "falling": "\\\\\\\\",
    "dots": "....",
    "cross": "xxxx",
    "horizontal": "----",
}
_HATCH_COLOR, _HATCH_OPACITY = "#ffffff", 0.55


def line_properties(style: LineStyle, width_factor: float = 1.0) -> dict[str, Any]:
    """Return the properties of a line; Matplotlib counts dashes in line widths too."""
    dash: Any = (0, style.dash) if style.dash else "solid"
    return {
        "color": COLORS[style.color].light,
        "lw": style.width * width_factor,
        "ls": dash,
    }


def box_properties(style: BoxStyle) -> dict[str, Any]:
    return {
        "fc": COLORS[style.fill].light,
        "ec": COLORS[style.edge].light,
        "lw": style.edge_width,
    }


# The phases of an iteration that is a smaller share of the time axis cannot be told
# apart.
_MIN_ITERATION_SHARE = 1 / 90
# Time after the last phase that is shown, as a share of the time before.
_SHARE_AFTER_LAST_PHASE = 1 / 25
# Iterations [first, end); end None: until the last one.
IterationRange = tuple[int, int | None]
_ALL: IterationRange = (0, None)


@dataclass(frozen=True)
class View:
    """One rank of a trace within an interval."""

    trace: Trace
    rank: int
    iterations: IterationRange  # Iterations to show.
    # The interval. Its origin is its start; it is as long as the longest view of the
    # figure.
    axis: TimeAxis

    def iteration_spans(self, on_gpu: bool) -> pd.DataFrame:
        """Return iteration, start_ns, end_ns of the finished iterations to show.

        Times are the GPU's or the host's.
        """
        return _select(intervals(self.trace, self.rank, on_gpu).spans, self.iterations)

    def phases(self, on_gpu: bool) -> pd.DataFrame:
        """Return the boxes of phases in the view, also of an unfinished iteration, on
        the clock of the GPU if all phases have its times."""
        return clip_boxes(
            phase_boxes(self.trace, self.rank, on_gpu and self.has_gpu_times), self.axis
        )

    @cached_property
    def loading_ns(self) -> int:
        """Time of a dry run before its first forward, which the view leaves out."""
        if not is_predicted(self.trace):
            return 0
        spans = intervals(self.trace, self.rank, device_times=False).spans
        starts = spans["start_ns"]
        return max(0, self.axis.start_ns - int(starts.min())) if len(starts) else 0

    @cached_property
    def has_room_for_phases(self) -> bool:
        """Whether iterations are long enough to draw their phases."""
        spans = self.iteration_spans(on_gpu=False)
        lengths = spans["end_ns"] - spans["start_ns"]
        return (
            spans.empty
            or float(lengths.median()) >= self.axis.length_ns * _MIN_ITERATION_SHARE
        )

    @cached_property
    def has_gpu_times(self) -> bool:
        """Whether every phase of a finished iteration has times of the GPU."""
        return has_gpu_times(self.trace, self.rank)


def make_views(
    traces: Sequence[Trace], iterations: IterationRange, rank: int | None
) -> list[View]:
    """Choose the interval of each trace; `rank` None: the first one. Raises TraceError
    where a trace has no such rank or no such iterations, or no data."""
    ranks = [(trace, _rank(trace, rank)) for trace in traces]
    bounds = [_bounds(trace, number, iterations) for trace, number in ranks]
    length = max(max(end - start for start, end in bounds), 1)
    return [
        View(trace, number, iterations, TimeAxis(start, start, end, length))
        for (trace, number), (start, end) in zip(ranks, bounds, strict=True)
    ]


def _rank(trace: Trace, rank: int | None) -> int:
    if rank is not None:
        trace.rank(rank)
        return rank
    if not trace.ranks:
        raise TraceError(f"{trace.path} has no ranks: nothing was recorded in it")
    return trace.ranks[0]


def _bounds(trace: Trace, rank: int, iterations: IterationRange) -> tuple[int, int]:
    """Return (start ns, end ns) of iterations.

    Of all iterations, it has a little of what followed; without any, it is the time of
    everything.
    """
    if iterations != _ALL:
        return _iteration_bounds(trace, rank, iterations)
    recorded = recorded_interval(trace, rank)
    if recorded is None:
        raise TraceError(
            f"{trace.path} has no phases, memory samples, link data or kernels: "
            "nothing to draw"
        )
    phases, spans = trace.phases(rank), intervals(trace, rank, device_times=False).spans
    if spans.empty:
        return recorded
    starts = phases["start_ns"]
    if not is_predicted(trace):
        starts = pd.concat([starts, spans["start_ns"]])
    start = int(starts.min())
    end = int(pd.concat([phases["end_ns"], phases["gpu_end_ns"].dropna()]).max())
    return start, min(end + int((end - start) * _SHARE_AFTER_LAST_PHASE), recorded[1])


def _iteration_bounds(
    trace: Trace, rank: int, iterations: IterationRange
) -> tuple[int, int]:
    spans = intervals(trace, rank, device_times=False).spans
    selected = _select(spans, iterations)
    if selected.empty:
        available = (
            f"{spans['iteration'].min()} to {spans['iteration'].max()}"
            if len(spans)
            else "none"
        )
        first, end = iterations
        raise TraceError(
            f"{trace.path} has no iterations {first}:{'' if end is None else end} (it "
            f"has {available})"
        )
    # The GPU ends an iteration later than the host.
    gpu_end = _select(intervals(trace, rank).spans, iterations)["end_ns"].max()
    return int(selected["start_ns"].min()), max(
        int(selected["end_ns"].max()), int(gpu_end)
    )


def _select(spans: pd.DataFrame, iterations: IterationRange) -> pd.DataFrame:
    first, end = iterations
    return spans[
        (spans["iteration"] >= first)
        & (spans["iteration"] < (np.inf if end is None else end))
    ]


# A band that is a smaller share of the axis would be invisible: it is drawn as a line
# of this width in points.
_MIN_BAND_SHARE = 1 / 500
_NARROW_WIDTH = 1.1


@dataclass(frozen=True)
class PanelDrawing(ABC):
    """The drawing of a panel in a figure; subclasses draw it."""

    view: View  # Trace, rank and interval.
    height: float  # Inches.
    panel: TimelinePanel
    # Whether the level must be on the scale.
    level_required: bool = field(kw_only=True, default=False)
    # Remarks for the line above, before the remarks of the panel.
    remarks: Sequence[str] = field(kw_only=True, default=())
    shows_phases: ClassVar[bool] = True  # Whether phases are drawn behind it.

    @property
    def name(self) -> str:
        return self.panel.name

    @property
    def notes(self) -> list[str]:
        """All remarks for the line above."""
        return [*self.remarks, *filter(None, [self.panel.reduction_note])]

    @abstractmethod
    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        """Draw everything except phases; return the artists that the legend lists."""


def draw_level(
    axes: Axes, view: View, level: float, scale: Scale, label: str
) -> list[Artist]:
    """Draw a line across at a level, as long as the view.

    Off the scale, draw only its legend entry.
    """
    style = line_properties(LEVEL)
    if abs(level) > scale.top:
        return list(axes.plot([], [], label=f"{label}, off scale", **style))
    length = (view.axis.end_ns - view.axis.start_ns) / view.axis.unit_ns
    return list(axes.plot([0, length], [level / scale.size] * 2, label=label, **style))


def shared_scale(drawings: Sequence[PanelDrawing]) -> Scale:
    """Choose the scale of drawings of one name."""
    pairs = [(drawing.panel.level, drawing.level_required) for drawing in drawings]
    levels = [(level, required) for level, required in pairs if level is not None]
    return value_scale(
        max(drawing.panel.largest for drawing in drawings),
        [level for level, _ in levels],
        [level for level, required in levels if required],
        rates=drawings[0].panel.is_link,
    )


def draw_stack(
    axes: Axes,
    stack: TimelineStack,
    axis: TimeAxis,
    size: float = 1.0,
    bottom: float = 0.0,
    prefix: str = "",
) -> list[Artist]:
    """Draw the areas of a stack, and return them from the top, as a legend lists them.
    `size` is the value of one unit of the axes; the stack begins at `bottom`, in these
    units."""
    edges, borders = (
        axis.x(stack.edges),
        [bottom + border / size for border in stack.borders],
    )
    drawn: list[Artist] = []
    for layer, low, high in zip(stack.layers, borders[:-1], borders[1:], strict=True):
        # Behind lines and in front of phases.
        style: dict[str, Any] = {
            "fc": COLORS[layer.style.color].light,
            "lw": 0,
            "zorder": 0.8,
        }
        if layer.style.hatch:
            style |= {
                "hatch": _HATCHES[layer.style.hatch],
                "ec": (_HATCH_COLOR, _HATCH_OPACITY),
            }
        drawn.append(
            axes.stairs(
                high,
                edges,
                baseline=low,
                fill=True,
                label=f"{prefix}{layer.name}",
                **style,
            )
        )
    return drawn[::-1]


def draw_phases(axes: Axes, view: View, on_gpu: bool) -> list[Artist]:
    """Draw a band per phase, if there is room, and return what the legend lists.

    An unfinished iteration has bands, too.
    """
    if not view.has_room_for_phases:
        return []
    drawn: list[Artist] = []
    phases = view.phases(on_gpu)
    full_height = axes.get_xaxis_transform()
    for phase, color in PHASE_COLORS.items():
        rows = phases[phases["phase"] == phase]
        if rows.empty:
            continue
        style: dict[str, Any] = {"color": color, "alpha": PHASE_OPACITY[phase], "lw": 0}
        left, right = (
            view.axis.x(rows[column].to_numpy(np.int64))
            for column in ("start_ns", "end_ns")
        )
        axes.broken_barh(
            list(zip(left, right - left, strict=True)),
            (0, 1),
            transform=full_height,
            zorder=0,
            **style,
        )
        narrow = (
            right - left < view.axis.length_ns / view.axis.unit_ns * _MIN_BAND_SHARE
        )
        middles = (left + right)[narrow] / 2
        axes.vlines(
            middles,
            0,
            1,
            transform=full_height,
            color=color,
            lw=_NARROW_WIDTH,
            zorder=0.7,
        )
        drawn.append(Patch(label=phase, **style))
    for border in view.axis.x(
        view.iteration_spans(on_gpu)["start_ns"].to_numpy(np.int64)[1:]
    ):
        axes.axvline(border, color=BORDER_COLOR, lw=0.6, zorder=0.5)
    return drawn


@dataclass(frozen=True)
class PhasesDrawing(PanelDrawing):
    """Phases alone, of a trace without anything else to draw."""

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        axes.set_yticks([])
        axes.set_ylabel("phases")
        return []
