"""Memory and link use over time, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ebbtide.analysis.iterations import (
    capacity_bytes,
    first_device,
    intervals,
    link_peak,
    main_device,
    memory_line,
    moved,
)
from ebbtide.analysis.units import bytes_text, bytes_unit
from ebbtide.profiler.trace import Trace, TraceError

matplotlib.use("Agg")

PHASE_COLORS = {"forward": "#7fb3e6", "backward": "#f2b179", "update": "#93c98f"}
POOL_STYLES = {
    "device": ("#222222", 1.6),
    "reserved": ("#8856a7", 1.3),
    "allocated": ("#c51b3b", 1.5),
    "requested": ("#e08aa0", 1.0),
    "heap": ("#c51b3b", 1.5),
    "rss": ("#6b6b6b", 1.1),
}
LINK_COLORS = {"h2d": "#1f6f8b", "d2h": "#d1495b"}
# Beyond this many iterations the bands of their phases would be thinner than their outlines.
_MOST_BANDS = 60
# A line drawn with more points than this shows no more than its extremes.
_MOST_POINTS = 20_000


def draw(traces: Sequence[Trace], span: tuple[int, int | None] = (0, None), rank: int | None = None) -> Figure:
    """A figure with a panel per trace: memory over time with its phases, and below it the link where recorded.

    span: the iterations [first, end) to show. rank: the one to show, else each trace's first. Raises TraceError
    where a trace has no such rank or no such iterations.
    """
    chosen = [(trace, _rank(trace, rank)) for trace in traces]
    links = [_has_link(trace, r) for trace, r in chosen]
    heights = [h for link in links for h in ((3.0, 1.1) if link else (3.0,))]
    figure = Figure(figsize=(11, 1.0 + 1.25 * sum(heights)), layout="constrained", dpi=130)
    axes = iter(np.atleast_1d(figure.subplots(len(heights), 1, height_ratios=heights)).ravel())
    for (trace, r), link in zip(chosen, links, strict=True):
        start, end = _window(trace, r, span)
        memory = next(axes)
        _draw_memory(memory, trace, r, start, end)
        _draw_phases(memory, trace, r, start, end, numbers=True)
        _title(memory, trace, r, link)
        panels = [memory]
        if link:
            below = next(axes)
            _draw_link(below, trace, r, start, end)
            _draw_phases(below, trace, r, start, end, numbers=False)
            memory.tick_params(labelbottom=False)
            panels.append(below)
        for panel in panels:
            panel.set_xlim(0, max(end - start, 1) / 1e9)
            panel.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("time (s)")
    return figure


def _rank(trace: Trace, rank: int | None) -> int:
    if rank is not None:
        trace.rank(rank)
        return rank
    if not trace.ranks:
        raise TraceError(f"{trace.path} holds no rank: nothing was recorded in it")
    return trace.ranks[0]


def _window(trace: Trace, rank: int, span: tuple[int, int | None]) -> tuple[int, int]:
    """(start ns, end ns) to show: the iterations asked for, or all there is, with a little of what followed."""
    first, last = span
    spans = intervals(trace, rank, device_times=False).spans
    if span != (0, None):
        kept = spans[(spans["iteration"] >= first) & (spans["iteration"] < (np.inf if last is None else last))]
        if kept.empty:
            has = f"{spans['iteration'].min()} to {spans['iteration'].max()}" if len(spans) else "none"
            asked = f"{first}:{'' if last is None else last}"
            raise TraceError(f"{trace.path} has no iterations {asked} (it has {has})")
        return int(kept["start_ns"].min()), int(kept["end_ns"].max())
    phases, memory = trace.phases(rank), trace.memory(rank)["t_ns"]
    if phases.empty and memory.empty:
        raise TraceError(f"{trace.path} holds neither phases nor memory: there is nothing to draw")
    if phases.empty:
        return int(memory.min()), int(memory.max())
    start = int(min(spans["start_ns"].min() if len(spans) else np.inf, phases["start_ns"].min()))
    end = int(phases["end_ns"].max())
    return start, min(end + (end - start) // 25, int(max(end, memory.max() if len(memory) else 0)))


def _draw_memory(axes: Axes, trace: Trace, rank: int, start: int, end: int) -> None:
    lines = {}
    for pool in POOL_STYLES:
        times, sizes = memory_line(trace, rank, pool)
        if len(times):
            lines[pool] = _clipped(times, sizes, start, end)
    largest = max((float(sizes.max()) for _, sizes in lines.values() if len(sizes)), default=1.0)
    capacity = capacity_bytes(trace, rank)
    scale, unit = bytes_unit(largest)
    for pool, (times, sizes) in lines.items():
        color, width = POOL_STYLES[pool]
        axes.plot((times - start) / 1e9, sizes / scale, drawstyle="steps-post", color=color, lw=width, label=pool)
    top = largest / scale * 1.12
    # A capacity far above the lines would press them flat: then it is said instead of drawn.
    if capacity is not None and capacity / scale < 4 * top:
        axes.axhline(capacity / scale, color="#222222", lw=1.0, ls=(0, (5, 3)), label="capacity")
        top = max(top, capacity / scale * 1.08)
    elif capacity is not None:
        axes.plot(
            [],
            [],
            color="#222222",
            lw=1.0,
            ls=(0, (5, 3)),
            label=f"capacity {bytes_text(capacity)}, off scale",
        )
    axes.set_ylim(0, top or 1.0)
    axes.set_ylabel(f"memory ({unit})")


def _clipped(times: npt.NDArray[Any], sizes: npt.NDArray[Any], start: int, end: int) -> tuple[Any, Any]:
    """The part of a step function in [start, end], thinned to the extremes of each stretch where it is long."""
    first = max(int(np.searchsorted(times, start, side="right")) - 1, 0)
    after = int(np.searchsorted(times, end, side="right"))
    times, sizes = times[first:after].clip(start), sizes[first:after]
    if len(times) > _MOST_POINTS:
        stretch = 2 * len(times) // _MOST_POINTS + 1
        whole = len(times) // stretch * stretch
        folded = sizes[:whole].reshape(-1, stretch)
        base = np.arange(0, whole, stretch)
        extremes = [base + folded.argmin(axis=1), base + folded.argmax(axis=1), np.arange(whole, len(times))]
        keep = np.unique(np.concatenate(extremes))
        times, sizes = times[keep], sizes[keep]
    if len(times):
        times, sizes = np.append(times, end), np.append(sizes, sizes[-1])
    return times, sizes


def _draw_phases(axes: Axes, trace: Trace, rank: int, start: int, end: int, numbers: bool) -> None:
    """A band per phase, those of an unfinished iteration too, and the iterations' numbers above."""
    spans = intervals(trace, rank, device_times=False).spans
    spans = spans[(spans["start_ns"] >= start) & (spans["end_ns"] <= end)]
    phases = trace.phases(rank)
    phases = phases[(phases["end_ns"] > start) & (phases["start_ns"] < end)]
    for phase, color in PHASE_COLORS.items() if len(spans) <= _MOST_BANDS else ():
        rows = phases[phases["phase"] == phase]
        bands = [((s - start) / 1e9, (e - s) / 1e9) for s, e in zip(rows["start_ns"], rows["end_ns"], strict=True)]
        axes.broken_barh(bands, (0, 1), transform=axes.get_xaxis_transform(), color=color, alpha=0.38, lw=0, zorder=0)
    if 1 < len(spans) <= _MOST_BANDS:
        for border in spans["start_ns"].iloc[1:]:
            axes.axvline((border - start) / 1e9, color="#999999", lw=0.6, zorder=0.5)
    if not numbers:
        return
    top = axes.get_xaxis_transform()
    for span in spans.iloc[:: max(1, len(spans) // 20)].itertuples(index=False):
        middle = ((span.start_ns + span.end_ns) / 2 - start) / 1e9
        axes.text(middle, 1.0, str(span.iteration), transform=top, ha="center", va="bottom", fontsize=7.5, color="#555")


def _draw_link(axes: Axes, trace: Trace, rank: int, start: int, end: int) -> None:
    peak = link_peak(trace, rank)
    rows = trace.link(rank)
    rows = rows[(rows["device"] == main_device(trace, rank)) & (rows["t_ns"] > start) & (rows["t_ns"] <= end)]
    for direction, color in LINK_COLORS.items():
        if len(rows):
            times = (rows["t_ns"].to_numpy() - start) / 1e9
            rates = rows[f"{direction}_bytes_per_s"].to_numpy() / 1e9
            axes.plot(times, rates, drawstyle="steps-pre", color=color, lw=1.1, label=direction)
        else:
            times, rates = _copy_rate(trace, rank, direction, start, end)
            axes.plot(times, rates, drawstyle="steps-post", color=color, lw=1.1, label=direction)
    if peak is not None:
        axes.axhline(peak / 1e9, color="#222222", lw=1.0, ls=(0, (5, 3)), label="peak")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("link (GB/s)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=8.5)


def _copy_rate(trace: Trace, rank: int, direction: str, start: int, end: int) -> tuple[Any, Any]:
    """The mean rate of the copies in a thousand slots of the window: (times s, GB/s)."""
    total = moved(trace, rank, direction)
    slots = np.linspace(start, end, 1001).astype(np.int64)
    if total is None or end <= start:
        return np.empty(0), np.empty(0)
    rates = np.diff(total(slots)) / np.diff(slots)
    return (slots[:-1] - start) / 1e9, rates


def _title(axes: Axes, trace: Trace, rank: int, link: bool) -> None:
    device = first_device(trace, rank).get("name")
    parts = [trace.name, *([f"rank {rank}"] if len(trace.ranks) > 1 else []), *([device] if device else [])]
    if not link:
        parts.append("no GPU link was recorded")
    axes.set_title(" · ".join(parts), fontsize=10.5, loc="left", pad=16)
    bands = [Patch(color=color, alpha=0.38, lw=0, label=phase) for phase, color in PHASE_COLORS.items()]
    lines = axes.get_legend_handles_labels()[0]
    axes.legend(handles=[*lines, *bands], loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=8.5)


def _has_link(trace: Trace, rank: int) -> bool:
    return len(trace.link(rank)) > 0 or len(trace.transfers(rank)) > 0
