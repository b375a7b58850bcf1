"""Heat maps of ranks by iterations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.panels import PlotPanel, View
from ebbtide.analysis.timeline.heat import LEVEL_COLORS, HeatMap, heat_levels, heat_maps
from ebbtide.analysis.timeline.panels import Scale
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.errors import TraceError
from ebbtide.units import ms_text

CONTENT = "ranks by iterations"
# Ranks that differ, as listed beside the picture.
_MAX_LISTED = 10
# Cells of a picture: of more ranks or iterations each cell is the largest of several, none thinner than a pixel.
_MAX_CELLS = (128, 500)


@dataclass(frozen=True)
class RanksPanel(PlotPanel):
    """A heat map: a row per rank, a column per iteration, as wide as the iteration."""

    heat: HeatMap
    edges_ns: Floats
    levels: Floats
    legend: bool

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        values, edges = self.heat.behind_ms, [np.arange(len(self.heat.ranks) + 1) - 0.5, self.edges_ns]
        for dimension, (count, most) in enumerate(zip(values.shape, _MAX_CELLS, strict=True)):
            firsts = np.arange(min(count, most)) * count // min(count, most)
            values = np.fmax.reduceat(values, firsts, axis=dimension)
            edges[dimension] = edges[dimension][[*firsts, count]]
        rows, times_ns = edges
        axes.pcolormesh(
            self.view.axis.x(times_ns.astype(np.int64)),
            rows,
            values,
            cmap=ListedColormap(LEVEL_COLORS),
            norm=BoundaryNorm([0.0, *self.levels, np.inf], len(LEVEL_COLORS)),
            rasterized=True,
        )
        axes.set_ylim(rows[-1], rows[0])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ranks = self.heat.ranks
        axes.yaxis.set_major_formatter(lambda row, _: str(ranks[int(row)]) if 0 <= row < len(ranks) else "")
        axes.set_ylabel(f"{self.heat.part}\nrank")
        return self._legend() if self.legend else []

    def _legend(self) -> list[Artist]:
        texts = [f"less than {ms_text(self.levels[0])} behind", *(f"{ms_text(level)} or more" for level in self.levels)]
        drawn: list[Artist] = [
            Patch(fc=color, ec="#bbbbbb", lw=0.5, label=text) for color, text in zip(LEVEL_COLORS, texts, strict=True)
        ]
        differences = rank_differences(self.view.trace).differences
        listed = [f"{difference.name}: {difference.cause}" for difference in differences[:_MAX_LISTED]]
        if len(differences) > _MAX_LISTED:
            listed.append(f"and {len(differences) - _MAX_LISTED} more")
        return drawn + [Patch(fc="none", ec="none", label=text) for text in listed]


def panels(view: View, layout: Layout) -> Sequence[PlotPanel]:
    """Return a heat map of the late start and of each phase. Raises TraceError for one rank, or no steady iteration."""
    maps = heat_maps(view.trace)
    spans = view.iteration_spans(on_gpu=False)
    shown = [number for number in spans["iteration"].tolist() if maps and number in set(maps[0].iterations)]
    if not shown:
        reason = "it has one rank" if len(view.trace.ranks) < 2 else "it has no iterations after the warm-up to show"
        raise TraceError(f"{view.trace.path}: ranks cannot be compared: {reason}")
    spans = spans[spans["iteration"].isin(shown)]
    edges = np.append(spans["start_ns"].to_numpy(np.float64), float(spans["end_ns"].iloc[-1]))
    columns = np.searchsorted(maps[0].iterations, shown)
    maps = [HeatMap(heat.part, heat.ranks, shown, heat.behind_ms[:, columns]) for heat in maps]
    levels = heat_levels([heat.behind_ms for heat in maps])
    differing = len(rank_differences(view.trace).ranks)
    comparison = f"{differing} of them differ" if differing else "which agree: none of them differs"
    remarks = (f"{len(view.trace.ranks)} ranks, {comparison}; ms behind the median rank",)
    return [
        RanksPanel(
            view,
            2 * layout.tall / len(maps),
            heat,
            edges,
            levels,
            legend=index == 0,
            name="ranks",
            remarks=remarks if index == 0 else (),
        )
        for index, heat in enumerate(maps)
    ]
