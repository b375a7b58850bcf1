"""Use of the link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.panels import (
    TEXT_COLOR,
    PanelDrawing,
    View,
    draw_level,
    line_properties,
)
from ebbtide.analysis.timeline.axis import PICTURE
from ebbtide.analysis.timeline.link import link_panel
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.analysis.timeline.styles import COLORS, LINK_COLORS
from ebbtide.errors import TraceError

CONTENT = "link"
_SIDES = {"h2d": "up", "d2h": "down"}


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    return link_panels(view, layout.middle, required=True)


@dataclass(frozen=True)
class LinkDrawing(PanelDrawing):
    """Rates of both directions of the link."""

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        drawn: list[Artist] = []
        for line in self.panel.lines:
            label = f"{line.name} ({_SIDES[line.name]}){line.detail}"
            edges, rates = (
                self.view.axis.x(line.edges),
                line.sign * line.values / scale.size,
            )
            drawn.append(
                axes.stairs(
                    rates,
                    edges,
                    baseline=0.0,
                    label=label,
                    **line_properties(line.style),
                )
            )
            fill = COLORS[line.style.fill or line.style.color].light
            axes.stairs(
                rates, edges, baseline=0.0, fill=True, color=fill, lw=0, zorder=0.9
            )
        axes.axhline(0.0, color=TEXT_COLOR, lw=0.7)
        if self.panel.level is not None:
            draw_level(axes, self.view, -self.panel.level, scale, "")
            drawn += draw_level(
                axes, self.view, self.panel.level, scale, self.panel.level_label
            )
        drawn += self._mark_above_peak(axes, scale)
        axes.set_ylim(-scale.top / scale.size, scale.top / scale.size)
        axes.locator_params(axis="y", nbins=7)
        axes.yaxis.set_major_formatter(lambda rate, _: f"{abs(rate):g}")
        axes.set_ylabel(f"link ({scale.unit})")
        return drawn

    def _mark_above_peak(self, axes: Axes, scale: Scale) -> Iterator[Artist]:
        """Mark every rate above the peak at the edge.

        Such rates are impossible and do not set the scale.
        """
        for direction, marked in self.panel.above_peak_ns.items():
            sign = next(
                line.sign for line in self.panel.lines if line.name == direction
            )
            yield axes.plot(
                self.view.axis.x(marked),
                np.full(len(marked), sign * scale.top / scale.size),
                ls="none",
                marker="^" if sign > 0 else "v",
                ms=4.5,
                color=LINK_COLORS[direction],
                clip_on=False,
                zorder=4,
                label=f"{len(marked):,} × {direction} above the peak",
            )[0]


def link_panels(view: View, height: float, required: bool) -> list[LinkDrawing]:
    """Return the panel of the link, none where it was not recorded.

    Neither copies nor counters were recorded then, and TraceError is raised if the
    panel is `required`.
    """
    content = link_panel(view.trace, view.rank, view.axis, PICTURE)
    if required and content is None:
        raise TraceError(
            f"rank {view.rank} of {view.trace.path} has no link to draw: neither "
            "copies nor link counters were recorded"
        )
    return [LinkDrawing(view, height, content)] if content is not None else []
