"""A picture of a replay: the iteration of each policy, phase by phase, when the optimizer works, the bound,
and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebbtide.analysis.plot import PHASE_COLORS
from ebbtide.interleave.model.overlap import NO_OVERLAP
from ebbtide.interleave.model.plan import LATE_KINDS
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.results import PolicyResult, Replay
from ebbtide.phases import OTHER, PHASES

matplotlib.use("Agg")

_HATCHES = {"other": "", "forward": "//", "backward": "\\\\", "update": ""}
_OTHER_COLOR = "#d0d0d0"
_BYTES_COLOR = "#8a8a8a"
# The strip below each bar where updates run, or state and parameters are copied for them.
_STRIP_COLOR, _STRIP_TOP, _STRIP_HEIGHT = "#1b5e20", 0.33, 0.09
_FITS_TEXTS = {True: "", False: ", does not fit", None: ", not known to fit"}
_FONT_SIZE = 8.5
# Characters of a line of a policy's string.
_MAX_NAME_WIDTH = 36
# What is drawn beside the iteration where it is not 0 for every policy.
_BYTES: tuple[tuple[str, Callable[[PolicyResult], float]], ...] = (
    ("device memory (GB)", lambda result: result.peak_device_bytes),
    ("host memory (GB)", lambda result: result.host_bytes),
    ("storage traffic (GB)", lambda result: result.storage_read_bytes + result.storage_written_bytes),
)


def chart(replay: Replay) -> Figure:
    """Draw the phases of each policy as bars, in the order requested, the bound as a line, and bytes beside them.

    Policies that do not fit, or are not known to fit, and those that are not exact, are labelled. A strip below each
    bar shows when updates, or copies of state and parameters, run; what is right of the bar runs under the next
    forward. The bound is that with the overlap of all policies.
    """
    results = replay.results
    shown = [(title, size_of) for title, size_of in _BYTES if any(size_of(result) for result in results)]
    size = (8.5 + 1.6 * len(shown), 1.8 + 0.45 * len(results))
    figure = Figure(figsize=size, layout="constrained", dpi=130)
    widths = [4.0] + [1.0] * len(shown)
    all_axes = figure.subplots(1, len(widths), squeeze=False, sharey=True, width_ratios=widths)[0]
    _draw_iterations(all_axes[0], replay)
    for axes, (title, size_of) in zip(all_axes[1:], shown, strict=True):
        _draw_bytes(axes, title, [size_of(result) / 1e9 for result in results])
    figure.suptitle(f"{replay.workload.name} on {replay.machine.name}", x=0.01, ha="left", fontsize=10.5)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=_FONT_SIZE)
    return figure


def _draw_iterations(axes: Axes, replay: Replay) -> None:
    results = replay.results
    rows = range(len(results))
    ends = np.zeros(len(results))
    colors = {OTHER: _OTHER_COLOR, **PHASE_COLORS}
    for phase in (OTHER, *PHASES):
        lengths = np.array([getattr(result, f"{phase}_ms") for result in results])
        axes.barh(
            rows, lengths, left=ends, height=0.62, color=colors[phase], hatch=_HATCHES[phase], edgecolor="white",
            linewidth=0.5, label=phase,
        )  # fmt: skip
        ends += lengths
    last_ms = 0.0
    for row, schedule in zip(rows, replay.schedules, strict=True):
        spans = _work_spans_ms(schedule)
        axes.broken_barh(spans, (row + _STRIP_TOP, _STRIP_HEIGHT), color=_STRIP_COLOR, lw=0)
        last_ms = max(last_ms, *(begin + length for begin, length in spans), 0.0)
    axes.barh(0, 0, color=_STRIP_COLOR, label="updates, copies")
    bound_ms = replay.overlap_bound.iteration_s * 1e3
    of_overlap = "" if replay.overlap == NO_OVERLAP else f", overlap={replay.overlap.name}"
    bound_name = f"bound{of_overlap}: {bound_ms:,.0f} ms"
    axes.axvline(bound_ms, color="#222222", lw=1.2, ls=(0, (5, 3)), label=bound_name)
    texts = [f"{_FITS_TEXTS[result.fits]}{'' if result.exact else ', not exact'}" for result in results]
    for row, text, end in zip(rows, texts, ends, strict=True):
        _write_figure(axes, row, end, f"{end:,.0f} ms{text}")
    axes.set_yticks(rows, [_wrapped(result.policy) for result in results])
    axes.invert_yaxis()
    room = 1.16 + 0.017 * max(map(len, texts))
    axes.set_xlim(0, max(max(float(ends.max()), bound_ms) * room, last_ms))
    axes.set_xlabel("time of an iteration (ms), simulated")
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(policy: str) -> str:
    """Return the string of a policy with a line for each few of its options, if it is long."""
    lines = [""]
    for part in policy.split(","):
        if lines[-1] and len(lines[-1]) + len(part) > _MAX_NAME_WIDTH:
            lines.append("")
        lines[-1] += f"{',' if lines[-1] else ''}{part}"
    return ",\n".join(lines)


def _work_spans_ms(schedule: Schedule) -> list[tuple[float, float]]:
    """Return (start, length) in ms of the intervals in which updates, or copies of state or parameters, run."""
    spans: list[list[float]] = []
    for start, end in sorted((start, end) for op, start, end in schedule.items() if op.kind in LATE_KINDS):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    return [(1e3 * start, 1e3 * (end - start)) for start, end in spans]


def _draw_bytes(axes: Axes, title: str, gigabytes: list[float]) -> None:
    axes.barh(np.arange(len(gigabytes)), gigabytes, height=0.62, color=_BYTES_COLOR)
    for row, size in enumerate(gigabytes):
        _write_figure(axes, row, size, f"{size:.3g}")
    axes.set_xlim(0, max(gigabytes) * 1.5)
    axes.set_xlabel(title)
    axes.tick_params(left=False)
    axes.spines[["top", "right"]].set_visible(False)


def _write_figure(axes: Axes, row: float, end: float, text: str) -> None:
    """Write a figure behind its bar."""
    axes.annotate(
        text,
        (end, row),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=_FONT_SIZE,
        # The line of the bound must not cross the text.
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )
