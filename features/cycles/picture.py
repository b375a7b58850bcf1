"""Draws one cycle: memory over time, with the names of its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebbtide.analysis.metrics.devices import capacity_bytes, memory_timeline
from ebbtide.errors import UserError
from ebbtide.features.cycles.cycles import Cycles, measured_cycles
from ebbtide.features.cycles.spans import OTHER, CycleSpan
from ebbtide.features.cycles.tables import headline
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# Okabe and Ito, "Color Universal Design" (2008), light enough for dark text.
_FILLS = ("#bfdff2", "#f7dfa8", "#bfe5d8", "#f3cfe0", "#d9d2ec", "#f6cfb5")
_OTHER_FILL, _LINE, _TEXT = "#eeeeee", "#12507b", "#222222"
_GIB = float(1 << 30)
# A part that is a smaller share of the picture has its name in the legend alone.
_MIN_NAMED_SHARE = 0.09


def save_picture(
    trace: Trace, cycles: Cycles | None, output: Path, force: bool
) -> None:
    """Write the picture of a typical cycle. Raises UserError where there is none."""
    measured = None if cycles is None else measured_cycles(trace, cycles.rank)
    if cycles is None or measured is None:
        raise UserError(f"{trace.path}: nothing repeats around its iterations")
    if cycles.pool is None:
        raise UserError(f"{trace.path}: no memory was recorded")
    spans = measured[1]
    usual_ns = np.median([cycle.length_ns for cycle in spans.steady])
    cycle = min(spans.steady, key=lambda one: abs(one.length_ns - usual_ns))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    timeline = memory_timeline(spans.trace, cycles.rank, cycles.pool)
    _draw_memory(axes, cycle, timeline)
    _draw_parts(axes, cycle)
    title = headline(cycles)
    capacity = capacity_bytes(trace, cycles.rank)
    if capacity:
        title += f" ({bytes_text(capacity)} of memory)"
    axes.set_title(title, fontsize=9, loc="left", color=_TEXT)
    axes.set_ylabel(f"{cycles.pool} GiB", fontsize=9)
    axes.set_xlabel("time in the cycle, ms", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    extension = output.suffix.removeprefix(".") or "png"
    if extension not in ("png", "svg", "pdf"):
        raise UserError(f"{output}: pictures are .png, .svg or .pdf")
    with new_output(output, force, Path.is_file, "a file") as path:
        figure.savefig(path, format=extension, dpi=150)


def _draw_memory(
    axes: Axes, cycle: CycleSpan, timeline: tuple[np.ndarray, np.ndarray]
) -> None:
    times, sizes = timeline
    first = max(int(np.searchsorted(times, cycle.start_ns, side="right")) - 1, 0)
    last = int(np.searchsorted(times, cycle.end_ns, side="right"))
    ms = np.clip(times[first:last], cycle.start_ns, cycle.end_ns) - cycle.start_ns
    values = sizes[first:last] / _GIB
    at_end = (cycle.length_ns / 1e6, values[-1] if len(values) else 0.0)
    axes.step(
        [*(ms / 1e6), at_end[0]],
        [*values, at_end[1]],
        where="post",
        color=_LINE,
        lw=1.5,
    )
    axes.set_xlim(0, cycle.length_ns / 1e6)
    axes.set_ylim(0, 1.25 * max(values.max(initial=0.0), 1e-9))


def _draw_parts(axes: Axes, cycle: CycleSpan) -> None:
    names = list(dict.fromkeys(part.name for part in cycle.with_rests()))
    own = [name for name in names if name != OTHER]
    fills = {name: _FILLS[at % len(_FILLS)] for at, name in enumerate(own)}
    fills |= dict.fromkeys((OTHER, cycle.rest), _OTHER_FILL)
    labelled: set[str] = set()
    top = axes.get_ylim()[1]
    for part in cycle.with_rests():
        start = (part.start_ns - cycle.start_ns) / 1e6
        end = (part.end_ns - cycle.start_ns) / 1e6
        label = None if part.name in labelled else part.name
        labelled.add(part.name)
        axes.axvspan(start, end, color=fills[part.name], lw=0, label=label)
        axes.axvline(start, color="#777777", lw=0.5)
        if part.length_ns >= _MIN_NAMED_SHARE * cycle.length_ns:
            axes.text(
                (start + end) / 2,
                0.97 * top,
                part.name.replace(" ", "\n", 1),
                ha="center",
                va="top",
                fontsize=8,
                color=_TEXT,
                clip_on=True,
            )
    axes.legend(
        fontsize=7,
        ncols=3,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
    )
