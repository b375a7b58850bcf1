"""A figure of one or more traces: a stack of panels for each, all on the same scales."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.plot.fitting import number_iterations, plain, shortened
from ebbtide.analysis.plot.link import link_panels
from ebbtide.analysis.plot.memory import memory_panels
from ebbtide.analysis.plot.panels import Panel, Scale, shared_scale
from ebbtide.analysis.plot.phases import draw_phases
from ebbtide.analysis.plot.views import View, views
from ebbtide.analysis.plot.windows import IdlePanel, WindowsPanel, windows_panels
from ebbtide.profiler.trace import Trace

Kind = Literal["both", "memory", "link", "windows"]
_WIDTH = 11.0
# Points: the widest text of a legend, and the sizes of the fonts.
_LEGEND = 190.0
_NAME_SIZE = 10.5
_FACTS_SIZE = 8.5


@contextmanager
def _any_letters() -> Iterator[None]:
    """Names may hold letters that the font lacks: they are drawn as boxes, and that is all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@_any_letters()
def draw(
    traces: Sequence[Trace],
    span: tuple[int, int | None] = (0, None),
    rank: int | None = None,
    kind: Kind = "both",
    min_bytes: int = 2**30,
) -> Figure:
    """A figure with a stack of panels per trace over time, beginning with its first iteration that is shown; axes of
    all traces have the same scales.

    span: the iterations [first, end) to show. rank: the one to show, else each trace's first. kind: `memory` (below
    it that of the host, where recorded), `link`, `both` (the link where recorded), or `windows` (when at least
    min_bytes are free, and how idle the link is then). Raises TraceError where a trace has no such rank or
    iterations, or nothing of that kind.
    """
    stacks = [_panels(view, kind, len(traces), min_bytes) for view in views(traces, span, rank)]
    panels = [panel for stack in stacks for panel in stack]
    scales = {name: shared_scale([p for p in panels if p.name == name]) for name in {p.name for p in panels}}
    heights = [panel.height for panel in panels]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.95 * len(stacks) + 0.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    names = _names(traces)
    figure.set_label(_title(names, kind))
    rows = iter(np.atleast_1d(figure.subplots(len(panels), 1, height_ratios=heights)).ravel())
    drawn = [[(next(rows), panel, scales[panel.name]) for panel in stack] for stack in stacks]
    for name, stack in zip(names, drawn, strict=True):
        for place, (axes, panel, scale) in enumerate(stack):
            _draw(axes, panel, scale, first=place == 0, last=place == len(stack) - 1)
        _titled(stack[0][0], name)
    figure.draw_without_rendering()
    # What follows fits itself into the layout as it now is.
    figure.set_layout_engine("none")
    for name, stack in zip(names, drawn, strict=True):
        _finish(*stack[0][:2], name, _facts([panel for _, panel, _ in stack], kind))
        for axes, panel, scale in stack:
            if isinstance(panel, (WindowsPanel, IdlePanel)):
                panel.annotate(axes, scale)
    return figure


@_any_letters()
def save(figure: Figure, file: Path | IO[bytes], format: str) -> None:
    """Write a figure as png, svg or pdf, with its title in the file's metadata. Raises OSError."""
    figure.savefig(file, format=format, metadata={"Title": figure.get_label()})


def _panels(view: View, kind: Kind, traces: int, min_bytes: int) -> list[Panel]:
    """The panels of one trace, from the top."""
    tall, low = (3.6, 1.7) if traces == 1 else (2.4, 1.4)
    if kind == "link":
        return [*link_panels(view, (tall + low) / 2, required=True)]
    if kind == "windows":
        return windows_panels(view, tall, min_bytes)
    link = link_panels(view, low, required=False) if kind == "both" else []
    return [*memory_panels(view, tall, with_host=kind == "memory", required=not link), *link]


def _draw(axes: Axes, panel: Panel, scale: Scale, first: bool, last: bool) -> None:
    handles = panel.draw(axes, scale)
    bands = draw_phases(axes, panel.view, panel.on_gpu) if not isinstance(panel, IdlePanel) else []
    if first:
        handles += bands
    axes.set_xlim(0, panel.view.length / panel.view.unit_ns)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=last)
    if last:
        axes.set_xlabel(f"time ({panel.view.unit})")
    figure = cast(Figure, axes.get_figure())
    legend = axes.legend(
        handles=handles,
        labels=[shortened(figure, plain(str(handle.get_label())), _FACTS_SIZE, _LEGEND) for handle in handles],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=_FACTS_SIZE,
        ncols=1 + len(handles) // 14,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _facts(stack: Sequence[Panel], kind: Kind) -> str:
    """What else than its name is to be known of the picture of a trace."""
    view = stack[0].view
    facts = [f"rank {view.rank}"] if len(view.trace.ranks) > 1 else []
    facts += [str(name)] if (name := first_device(view.trace, view.rank).get("name")) else []
    if kind == "both" and not any(panel.name == "link" for panel in stack):
        facts.append("no GPU link was recorded")
    if not view.is_wide:
        facts.append("no room for the phases: show fewer --iterations")
    elif view.has_gpu_times and any(panel.on_gpu for panel in stack):
        facts.append("phases behind the link: as the GPU ran them")
    return " · ".join([*facts, *(remark for panel in stack for remark in panel.remarks)])


def _titled(axes: Axes, name: str) -> None:
    """Set the name of a trace, with room below it for the facts and the iterations' numbers."""
    axes.set_title(name, loc="left", fontsize=_NAME_SIZE, pad=29, parse_math=False)


def _finish(axes: Axes, panel: Panel, name: str, facts: str) -> None:
    """Fit what stands above the panels of a trace into the room there is."""
    figure = cast(Figure, axes.get_figure())
    room = (1 - axes.get_position().x0) * _WIDTH * 72 - 6
    _titled(axes, shortened(figure, name, _NAME_SIZE, room))
    text = shortened(figure, plain(facts), _FACTS_SIZE, room)
    looks: dict[str, Any] = {"fontsize": _FACTS_SIZE, "color": "#444444", "parse_math": False}
    axes.annotate(text, (0, 1), xycoords="axes fraction", xytext=(0, 15), textcoords="offset points", **looks)
    spans = panel.view.spans(panel.on_gpu)
    middles = (panel.view.x(spans["start_ns"].to_numpy()) + panel.view.x(spans["end_ns"].to_numpy())) / 2
    number_iterations(axes, middles, spans["iteration"].tolist())


def _names(traces: Sequence[Trace]) -> list[str]:
    """What traces are called; by their paths where several have one name."""
    names = [trace.name for trace in traces]
    return [
        plain(name if names.count(name) == 1 else str(trace.path)) for name, trace in zip(names, traces, strict=True)
    ]


def _title(names: Sequence[str], kind: Kind) -> str:
    shown = {"both": "memory and link", "windows": "windows of free memory"}.get(kind, kind)
    return f"ebbtide: {shown} of {', '.join(names)}"
