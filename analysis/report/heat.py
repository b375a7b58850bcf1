"""Builds the heat maps of ranks by iterations that the page shows."""

import base64
import io
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.timeline.heat import LEVEL_COLORS, heat_levels, heat_maps
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

# Fewer ranks are compared by the table alone.
MIN_RANKS = 9
# Cells of a picture: of more ranks or iterations each cell is the largest of several.
_MAX_ROWS, _MAX_COLUMNS = 512, 1000
# Labels of ranks that differ need this share of the height, so that they do not overlap.
_LABEL_SHARE = 0.075


@dataclass(frozen=True)
class RankLabel:
    """The number of a rank that differs, its position from the top in percent, and the cause."""

    rank: int
    top: float
    cause: str


@dataclass(frozen=True)
class HeatSection:
    """Heat maps of all ranks."""

    # A picture per part of the iteration: its name, and its `data:` address. It has a row of cells per rank, a column
    # per iteration.
    pictures: list[tuple[str, str]]
    keys: list[tuple[str, str]]  # (colour, text) of each level.
    labels: list[RankLabel]  # Ranks that differ, as far as there is room.
    ranks: list[int]
    iterations: list[int]
    note: str  # Line on cells of several ranks or iterations; empty where each has its own.


def heat_section(trace: Trace) -> HeatSection | None:
    """Return the heat maps of a trace with many ranks; None with fewer, or without steady iterations."""
    maps = heat_maps(trace) if len(trace.ranks) >= MIN_RANKS else []
    if not maps:
        return None
    levels = heat_levels([heat.behind_ms for heat in maps])
    texts = [f"less than {ms_text(levels[0])}", *(f"{ms_text(level)} or more" for level in levels)]
    ranks, iterations = maps[0].ranks, maps[0].iterations
    sizes = {"ranks": -(-len(ranks) // _MAX_ROWS), "iterations": -(-len(iterations) // _MAX_COLUMNS)}
    cell = " and ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    return HeatSection(
        pictures=[(heat.part, _picture(heat.behind_ms, levels)) for heat in maps],
        keys=list(zip(LEVEL_COLORS, texts, strict=True)),
        labels=_labels(trace),
        ranks=ranks,
        iterations=iterations,
        note=f"each cell is the largest of up to {cell}" if cell else "",
    )


def _labels(trace: Trace) -> list[RankLabel]:
    differences = rank_differences(trace).differences
    causes = {rank: difference.cause for difference in reversed(differences) for rank in difference.ranks}
    labels: list[RankLabel] = []
    for row, rank in enumerate(trace.ranks):
        top = (row + 0.5) / len(trace.ranks)
        if rank in causes and (not labels or top >= labels[-1].top / 100 + _LABEL_SHARE):
            labels.append(RankLabel(rank, round(100 * top, 2), causes[rank]))
    return labels


def _picture(values: Floats, levels: Floats) -> str:
    # Few traces have so many ranks: the pages of others do not wait for Matplotlib.
    from matplotlib.colors import to_rgb
    from matplotlib.image import imsave

    # Each cell is the largest of those that it stands for.
    for axis, most in enumerate((_MAX_ROWS, _MAX_COLUMNS)):
        if (count := values.shape[axis]) > most:
            values = np.fmax.reduceat(values, np.arange(most) * count // most, axis=axis)
    colors = np.array([to_rgb(color) for color in LEVEL_COLORS])
    rgba = np.concatenate([colors[np.digitize(values, levels) % len(colors)], ~np.isnan(values)[..., None]], axis=2)
    file = io.BytesIO()
    imsave(file, (255 * rgba).round().astype(np.uint8), format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
