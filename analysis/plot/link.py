"""The panel of the link: h2d upwards, d2h downwards, so that neither hides the other, in grey too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.metrics.devices import link_peak
from ebbtide.analysis.plot.link_lines import SLOTS, LinkLine, link_lines
from ebbtide.analysis.plot.panels import Scale, draw_level
from ebbtide.analysis.plot.styles import LINK_COLORS, LINK_FILLS
from ebbtide.analysis.plot.views import View
from ebbtide.errors import TraceError
from ebbtide.units import ms_text, rate_text

_SIGNS = {"h2d": 1.0, "d2h": -1.0}
_WHERE = {"h2d": "up", "d2h": "down"}


@dataclass(frozen=True)
class LinkPanel:
    view: View
    lines: Sequence[LinkLine]
    level: float | None
    height: float
    remarks: Sequence[str]
    name: str = "link"
    whole: bool = False
    on_gpu: bool = True

    @property
    def largest(self) -> float:
        rates = np.concatenate([line.rates for line in self.lines])
        rates = rates[~np.isnan(rates)]
        return float(rates[rates <= (self.level or np.inf)].max(initial=0.0))

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        for line in self.lines:
            color, sign = LINK_COLORS[line.direction], _SIGNS[line.direction]
            label = f"{line.direction} ({_WHERE[line.direction]}){line.detail}"
            looks: dict[str, Any] = {"color": color, "lw": 0.8, "ls": line.dashes}
            edges, rates = self.view.x(line.edges), sign * line.rates / scale.size
            drawn.append(axes.stairs(rates, edges, baseline=0.0, label=label, **looks))
            axes.stairs(rates, edges, baseline=0.0, fill=True, color=LINK_FILLS[line.direction], lw=0, zorder=0.9)
        axes.axhline(0.0, color="#222222", lw=0.7)
        if self.level is not None:
            draw_level(axes, self.view, -self.level, scale, "peak")
            drawn += draw_level(axes, self.view, self.level, scale, f"peak {rate_text(self.level)}")
        drawn += self._above(axes, scale)
        axes.set_ylim(-scale.top / scale.size, scale.top / scale.size)
        axes.locator_params(axis="y", nbins=7)
        axes.yaxis.set_major_formatter(lambda rate, _: f"{abs(rate):g}")
        axes.set_ylabel(f"link ({scale.unit})")
        return drawn

    def _above(self, axes: Axes, scale: Scale) -> Iterator[Artist]:
        """A mark at the edge for every rate beyond the peak, which cannot be and does not set the scale."""
        for direction, sign in _SIGNS.items():
            marked = [line.above for line in self.lines if line.direction == direction and len(line.above)]
            if not marked:
                continue
            times = np.unique(np.concatenate(marked))
            yield axes.plot(
                self.view.x(times),
                np.full(len(times), sign * scale.top / scale.size),
                ls="none",
                marker="^" if sign > 0 else "v",
                ms=4.5,
                color=LINK_COLORS[direction],
                clip_on=False,
                zorder=4,
                label=f"{len(times):,} × {direction} above the peak",
            )[0]


def link_panels(view: View, height: float, required: bool) -> list[LinkPanel]:
    """None, or where it is required a TraceError, where neither copies nor counters were recorded."""
    lines = link_lines(view)
    if required and not lines:
        raise TraceError(
            f"rank {view.rank} of {view.trace.path} has no link to draw: neither copies nor its counters were recorded"
        )
    remarks = []
    if any(line.slots for line in lines):
        remarks.append(f"link: means over {ms_text((view.end - view.start) / SLOTS / 1e6)} each")
    return [LinkPanel(view, lines, link_peak(view.trace, view.rank), height, remarks)] if lines else []
