"""The panel of memory lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.devices import capacity_bytes, main_device, main_pool, memory_line
from ebbtide.analysis.plot.panels import Scale, draw_level
from ebbtide.analysis.plot.styles import pool_styles
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between
from ebbtide.errors import TraceError
from ebbtide.units import bytes_text, ms_text

# The whole time axis has so many slots. A line with more samples to a slot than these is drawn as a band, from the
# smallest to the largest size in each slot: as a line it would be a surface that hides others.
_SLOTS = 800
_MOST_TO_A_SLOT = 8


@dataclass(frozen=True)
class MemoryLine:
    """A step function. edges: ns, one more than sizes (bytes). lowest: None, or the smallest size of each step of a
    band, whose largest is in sizes."""

    edges: Ints
    sizes: Ints
    lowest: Ints | None = None


@dataclass(frozen=True)
class MemoryPanel:
    view: View
    name: str
    lines: dict[str, MemoryLine]
    level: float | None
    height: float
    whole: bool = False
    on_gpu: bool = False

    @property
    def largest(self) -> float:
        return max((float(line.sizes.max()) for line in self.lines.values()), default=0.0)

    @property
    def remarks(self) -> Sequence[str]:
        if all(line.lowest is None for line in self.lines.values()):
            return ()
        return (f"{self.name}: smallest to largest over {ms_text(self.view.length / _SLOTS / 1e6)} each",)

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        styles = pool_styles(list(self.lines))
        for pool, style in styles.items():
            line = self.lines[pool]
            edges, sizes = self.view.x(line.edges), line.sizes / scale.size
            looks: dict[str, Any] = {
                "color": style.color,
                "lw": style.width * (1.0 if self.view.is_wide else 0.6),
                "ls": style.dashes,
            }
            drawn.append(axes.stairs(sizes, edges, baseline=None, label=pool, **looks))
            if line.lowest is not None:
                lowest = line.lowest / scale.size
                axes.stairs(sizes, edges, baseline=lowest, fill=True, color=style.color, alpha=0.2, lw=0)
        if self.level is not None:
            drawn += draw_level(axes, self.view, self.level, scale, f"capacity {bytes_text(self.level)}")
        axes.set_ylim(0, scale.top / scale.size)
        axes.set_ylabel(f"{self.name} ({scale.unit})")
        return drawn


def memory_panels(view: View, height: float, with_host: bool, required: bool) -> list[MemoryPanel]:
    """The memory of the device, and that of the host below it where asked for: on the scale of the host's the lines of
    the card would lie flat. Where the device is the CPU they are one. Raises TraceError where there is nothing to draw
    but something is required."""
    rows = view.trace.memory(view.rank)
    device = main_device(view.trace, view.rank)
    found = {str(pool): line for pool in rows["pool"].unique() if (line := shown_line(view, str(pool))) is not None}
    main = main_pool(view.trace)
    # A pool that is always empty tells nothing, but that of the device itself does.
    found = {pool: line for pool, line in found.items() if pool == main or line.sizes.any()}
    on_device = set(rows.loc[rows["device"] == device, "pool"])
    on_host = set(rows.loc[rows["device"] == "cpu", "pool"]) - on_device
    own = {pool: line for pool, line in found.items() if pool not in on_host}
    host = {pool: line for pool, line in found.items() if pool in on_host}
    panels = []
    if own or len(view.trace.phases(view.rank)):
        panels.append(MemoryPanel(view, "memory", own, capacity_bytes(view.trace, view.rank), height))
    if host and (with_host or not own):
        panels.append(MemoryPanel(view, "host", host, None, 1.1))
    if required and not panels:
        raise TraceError(f"{view.trace.path} holds neither phases nor memory: try --kind link")
    return panels


def shown_line(view: View, pool: str) -> MemoryLine | None:
    """A pool's line in the view; None where it has no value there."""
    times, sizes = memory_line(view.trace, view.rank, pool)
    first = max(int(np.searchsorted(times, view.start, side="right")) - 1, 0)
    after = int(np.searchsorted(times, view.end, side="right"))
    if first >= after:
        return None
    times, sizes = times[first:after].clip(view.start), sizes[first:after]
    lasting = int(view.end - times[0])
    slots = max(1, round(_SLOTS * lasting / view.length))
    if len(times) <= _MOST_TO_A_SLOT * slots:
        return MemoryLine(np.append(times, view.end), sizes)
    edges = times[0] + np.linspace(0, lasting, slots + 1).astype(np.int64)
    largest, lowest = (sign * peak_between(times, sign * sizes, edges[:-1], edges[1:]) for sign in (1, -1))
    return MemoryLine(edges, largest.astype(np.int64), lowest.astype(np.int64))
