"""Heat maps of ranks by iterations, by how much each rank is behind the median one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.metrics.ranks.rank_series import (
    centered_rows,
    hosts_of,
    phase_series,
)
from ebbtide.analysis.plot.kinds import Layout
from ebbtide.analysis.plot.panels import PanelDrawing, View
from ebbtide.analysis.timeline.panels import Scale, TimelinePanel
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.errors import TraceError
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

CONTENT = "ranks by iterations"
LATE = "late start"
# From little to much, darker and darker (for colour-blind readers); the first is below
# the first level.
LEVEL_COLORS = ("#f3f3f1", "#fdd0a2", "#f9934a", "#c9480a", "#6b2003")
# Single extreme cells do not set the levels.
_TOP_PERCENTILE = 99.9
_MIN_STEP_MS = 0.01
# Ranks that differ, as listed beside the picture.
_MAX_LISTED = 10
# Cells of a picture: of more ranks or iterations each cell is the largest of several,
# none thinner than a pixel.
_MAX_CELLS = (128, 500)


@dataclass(frozen=True)
class RanksDrawing(PanelDrawing):
    """A heat map: a row per rank, a column per iteration, as wide as the iteration."""

    part: str
    behind_ms: Floats
    edges_ns: Floats
    levels: Floats
    legend: bool
    shows_phases = False

    def draw(self, axes: Axes, scale: Scale) -> list[Artist]:
        ranks = self.view.trace.ranks
        values, edges = self.behind_ms, [np.arange(len(ranks) + 1) - 0.5, self.edges_ns]
        for dimension, (count, most) in enumerate(
            zip(values.shape, _MAX_CELLS, strict=True)
        ):
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
        axes.yaxis.set_major_formatter(
            lambda row, _: str(ranks[int(row)]) if 0 <= row < len(ranks) else ""
        )
        axes.set_ylabel(f"{self.part}\nrank")
        return self._legend() if self.legend else []

    def _legend(self) -> list[Artist]:
        texts = [
            f"less than {ms_text(self.levels[0])} behind",
            *(f"{ms_text(level)} or more" for level in self.levels),
        ]
        drawn: list[Artist] = [
            Patch(fc=color, ec="#bbbbbb", lw=0.5, label=text)
            for color, text in zip(LEVEL_COLORS, texts, strict=True)
        ]
        differences = rank_differences(self.view.trace).differences
        listed = [
            f"{difference.name}: {difference.cause}"
            for difference in differences[:_MAX_LISTED]
        ]
        if len(differences) > _MAX_LISTED:
            listed.append(f"and {len(differences) - _MAX_LISTED} more")
        return drawn + [Patch(fc="none", ec="none", label=text) for text in listed]


def panels(view: View, layout: Layout) -> Sequence[PanelDrawing]:
    """Return a heat map of the late start and of each phase. Raises TraceError for one
    rank, or no steady iteration."""
    maps = heat_maps(view.trace)
    spans = view.iteration_spans(on_gpu=False)
    numbers = steady_iterations(view.trace).numbers
    shown = [
        number for number in spans["iteration"].tolist() if maps and number in numbers
    ]
    if not shown:
        reason = (
            "it has one rank"
            if len(view.trace.ranks) < 2
            else "it has no iterations after the warm-up to show"
        )
        raise TraceError(f"{view.trace.path}: ranks cannot be compared: {reason}")
    spans = spans[spans["iteration"].isin(shown)]
    edges = np.append(
        spans["start_ns"].to_numpy(np.float64), float(spans["end_ns"].iloc[-1])
    )
    columns = np.searchsorted(numbers, shown)
    maps = {part: behind_ms[:, columns] for part, behind_ms in maps.items()}
    levels = heat_levels([*maps.values()])
    differing = len(rank_differences(view.trace).ranks)
    comparison = (
        f"{differing} of them differ"
        if differing
        else "which agree: none of them differs"
    )
    remarks = (
        f"{len(view.trace.ranks)} ranks, {comparison}; ms behind the median rank",
    )
    return [
        RanksDrawing(
            view,
            2 * layout.tall / len(maps),
            TimelinePanel("ranks"),
            part,
            behind_ms,
            edges,
            levels,
            legend=index == 0,
            remarks=remarks if index == 0 else (),
        )
        for index, (part, behind_ms) in enumerate(maps.items())
    ]


def heat_maps(trace: Trace) -> dict[str, Floats]:
    """Return the heat maps of the late start and of each recorded phase.

    The late start is the start of a rank's first phase, on its host. There are none for
    a single rank. A row per rank, a column per steady iteration: ms above the median
    rank, 0 where faster, NaN where not recorded.
    """
    if len(trace.ranks) < 2 or not steady_iterations(trace).numbers:
        return {}
    tables = [phase_series(trace, rank).columns for rank in trace.ranks]
    starts = np.stack(
        [
            np.fmin.reduce([table[f"{phase}_start_ms"] for phase in PHASES])
            for table in tables
        ]
    )
    of_parts = {LATE: centered_rows(starts, hosts_of(trace), np.nanmin)}
    for phase in PHASES:
        times = np.stack([table[f"{phase}_ms"] for table in tables])
        of_parts[phase] = centered_rows(times, np.zeros(len(times)), np.nanmin)
    return {
        part: np.maximum(behind, 0.0)
        for part, behind in of_parts.items()
        if not np.isnan(behind).all()
    }


def heat_levels(values: list[Floats]) -> Floats:
    """Return the levels, in ms, of heat maps that share them: one fewer than
    LEVEL_COLORS.

    Each is twice the one before, the first is 1, 2 or 5 times a power of ten, and the
    largest values (NaN: not recorded) exceed the last."""
    recorded = np.concatenate([rows[~np.isnan(rows)] for rows in values])
    top = float(np.percentile(recorded, _TOP_PERCENTILE)) if len(recorded) else 0.0
    count = len(LEVEL_COLORS) - 1
    step = max(top / 2 ** (count - 1), _MIN_STEP_MS)
    power = 10 ** math.floor(math.log10(step))
    nice = max(factor for factor in (1, 2, 5) if factor * power <= step * (1 + 1e-9))
    levels: Floats = nice * power * 2.0 ** np.arange(count)
    return levels
