"""Figures of one or more traces: a stack of panels for each, all on the same scales."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.iterations import on_device_clock
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.plot.kinds import Layout, find_kind
from ebbtide.analysis.plot.kinds.windows import IdleDrawing, WindowsDrawing
from ebbtide.analysis.plot.panels import (
    NOTE_COLOR,
    IterationRange,
    PanelDrawing,
    View,
    draw_phases,
    make_views,
    shared_scale,
)
from ebbtide.analysis.plot.text import number_iterations, plain_text, shorten_text
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

_WIDTH = 11.0
# Points: the widest text of a legend, and the sizes of the fonts.
_LEGEND_WIDTH = 190.0
_TITLE_SIZE = 10.5
_NOTE_SIZE = 8.5
# Entries per column of a legend.
_LEGEND_ROWS = 14


@contextmanager
def _ignore_missing_glyphs() -> Iterator[None]:
    """Draw letters that the font lacks as boxes, without a warning.

    Names of traces may have any letters.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@_ignore_missing_glyphs()
def draw(
    traces: Sequence[Trace],
    span: IterationRange = (0, None),
    rank: int | None = None,
    kind: str = "both",
    min_bytes: int = 2**30,
) -> Figure:
    """Draw a stack of panels per trace over time, all on the same scales, for the
    iterations [first, end) of `span`.

    `rank` None: the first one of each trace; `kind`: one of `kinds`; `min_bytes`: least
    free memory of a window. Raises TraceError where a trace has no such rank or
    iterations, or no data of that kind, and UserError for another kind."""
    drawer = find_kind(kind)
    layout = Layout(*((3.6, 1.7) if len(traces) == 1 else (2.4, 1.4)), min_bytes)
    traces = [
        on_device_clock(trace) if kind == "windows" or is_predicted(trace) else trace
        for trace in traces
    ]
    stacks = [drawer.panels(view, layout) for view in make_views(traces, span, rank)]
    panels = [drawing for stack in stacks for drawing in stack]
    scales = {
        name: shared_scale([p for p in panels if p.name == name])
        for name in {p.name for p in panels}
    }
    heights = [drawing.height for drawing in panels]
    figure = Figure(
        figsize=(_WIDTH, sum(heights) + 0.95 * len(stacks) + 0.2),
        layout="constrained",
        dpi=130,
    )
    FigureCanvasAgg(figure)
    names = _names(traces)
    figure.set_label(f"ebbtide: {drawer.CONTENT} of {', '.join(names)}")
    rows = iter(
        np.atleast_1d(figure.subplots(len(panels), 1, height_ratios=heights)).ravel()
    )
    drawn = [
        [(next(rows), drawing, scales[drawing.name]) for drawing in stack]
        for stack in stacks
    ]
    for name, stack in zip(names, drawn, strict=True):
        for index, (axes, drawing, scale) in enumerate(stack):
            _draw_panel(
                axes,
                drawing,
                scale,
                is_first=index == 0,
                is_last=index == len(stack) - 1,
            )
        _set_title(stack[0][0], name)
    figure.draw_without_rendering()
    # Texts from here on are fitted into the layout as it is now.
    figure.set_layout_engine("none")
    for name, stack in zip(names, drawn, strict=True):
        _write_head(
            *stack[0][:2], name, _notes([drawing for _, drawing, _ in stack], kind)
        )
        for axes, drawing, scale in stack:
            if isinstance(drawing, (WindowsDrawing, IdleDrawing)):
                drawing.annotate(axes, scale)
    return figure


@_ignore_missing_glyphs()
def save(figure: Figure, file: Path | IO[bytes], format: str) -> None:
    """Write a figure as `png`, `svg` or `pdf`, its title in the metadata. Raises
    OSError if it cannot."""
    figure.savefig(file, format=format, metadata={"Title": figure.get_label()})


def _draw_panel(
    axes: Axes, drawing: PanelDrawing, scale: Scale, is_first: bool, is_last: bool
) -> None:
    axis = drawing.view.axis
    handles = drawing.draw(axes, scale)
    bands = (
        draw_phases(axes, drawing.view, drawing.panel.on_gpu)
        if drawing.shows_phases
        else []
    )
    if is_first:
        handles += bands
    axes.set_xlim(0, axis.length_ns / axis.unit_ns)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=is_last)
    if is_last:
        axes.set_xlabel(f"time ({axis.unit})")
    if not handles:
        return
    figure = cast(Figure, axes.get_figure())
    labels = [plain_text(str(handle.get_label())) for handle in handles]
    legend = axes.legend(
        handles=handles,
        labels=[
            shorten_text(figure, label, _NOTE_SIZE, _LEGEND_WIDTH) for label in labels
        ],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=_NOTE_SIZE,
        ncols=1 + len(handles) // _LEGEND_ROWS,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _notes(stack: Sequence[PanelDrawing], kind: str) -> str:
    """Return the line below a trace's name: rank, device, remarks."""
    view = stack[0].view
    notes = (
        [f"rank {view.rank}"] if len(view.trace.ranks) > 1 and kind != "ranks" else []
    )
    notes += [name] if (name := first_device(view.trace, view.rank).name) else []
    names = {drawing.name for drawing in stack}
    if kind in ("both", "all"):
        notes += (
            ["no memory was recorded"] if not names & {"memory", "host memory"} else []
        )
        notes += ["no GPU link was recorded"] if "link" not in names else []
    if view.loading_ns:
        notes.append(f"{ms_text(view.loading_ns / 1e6)} of loading before")
    if not view.has_room_for_phases and kind != "ranks":
        notes.append("phases too short to draw: show fewer --iterations")
    elif not is_predicted(view.trace) and _are_on_gpu(view, stack):
        on_gpu = " and ".join(drawing.name for drawing in stack if drawing.panel.on_gpu)
        notes.append(f"phases behind the {on_gpu}: GPU times")
    return " · ".join(
        [*notes, *(remark for drawing in stack for remark in drawing.notes)]
    )


def _are_on_gpu(view: View, stack: Sequence[PanelDrawing]) -> bool:
    """Return whether phases behind some panels have times of the GPU."""
    return view.has_gpu_times and any(drawing.panel.on_gpu for drawing in stack)


def _set_title(axes: Axes, name: str) -> None:
    """Set the name of a trace, with room below it.

    The room is for the notes and the numbers of iterations.
    """
    axes.set_title(name, loc="left", fontsize=_TITLE_SIZE, pad=29, parse_math=False)


def _write_head(axes: Axes, drawing: PanelDrawing, name: str, notes: str) -> None:
    """Fit name, notes and numbers of iterations above the panels of a trace."""
    figure = cast(Figure, axes.get_figure())
    room = (1 - axes.get_position().x0) * _WIDTH * 72 - 6
    _set_title(axes, shorten_text(figure, name, _TITLE_SIZE, room))
    text = shorten_text(figure, plain_text(notes), _NOTE_SIZE, room)
    style: dict[str, Any] = {
        "fontsize": _NOTE_SIZE,
        "color": NOTE_COLOR,
        "parse_math": False,
    }
    axes.annotate(
        text,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 15),
        textcoords="offset points",
        **style,
    )
    spans, axis = drawing.view.iteration_spans(drawing.panel.on_gpu), drawing.view.axis
    starts = axis.x(spans["start_ns"].to_numpy().clip(axis.start_ns))
    middles = (starts + axis.x(spans["end_ns"].to_numpy())) / 2
    number_iterations(axes, middles, spans["iteration"].tolist())


def _names(traces: Sequence[Trace]) -> list[str]:
    """Return the names of traces; the paths of those that share a name. Traces of dry
    runs are marked."""
    names = [trace.name for trace in traces]
    return [
        plain_text(name if names.count(name) == 1 else str(trace.path))
        + (" (predicted)" if is_predicted(trace) else "")
        for name, trace in zip(names, traces, strict=True)
    ]
