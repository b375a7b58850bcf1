"""Heat maps of ranks by iterations, by how much each rank is behind the median one: cells, levels and colours."""

import math
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.rank_series import centered_rows, hosts_of, phase_series
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace

LATE = "late start"
# From little to much, each darker than the one before: they differ in grey and for colour-blind readers. The first one
# is that of cells below the first level.
LEVEL_COLORS = ("#f3f3f1", "#fdd0a2", "#f9934a", "#c9480a", "#6b2003")
# Single extreme cells do not set the levels.
_TOP_PERCENTILE = 99.9
_MIN_STEP_MS = 0.01


@dataclass(frozen=True)
class HeatMap:
    """Milliseconds by which ranks are behind, of one part of the iteration."""

    # A phase, whose time is compared; or `late start`: by how much the rank's first phase begins after that of the
    # median rank of its host.
    part: str
    ranks: list[int]  # The ranks, a row each.
    iterations: list[int]  # The steady iterations, a column each.
    # Milliseconds above the median rank of the same iteration; 0 where a rank is faster, NaN where not recorded.
    behind_ms: Floats


def heat_maps(trace: Trace) -> list[HeatMap]:
    """Return the heat map of the late start and of each phase that was recorded; none of a single rank."""
    numbers = steady_iterations(trace).numbers
    if len(trace.ranks) < 2 or not numbers:
        return []
    tables = [phase_series(trace, rank).columns for rank in trace.ranks]
    starts = np.stack([np.fmin.reduce([table[f"{phase}_start_ms"] for phase in PHASES]) for table in tables])
    of_parts = {LATE: centered_rows(starts, hosts_of(trace), np.nanmin)}
    for phase in PHASES:
        times = np.stack([table[f"{phase}_ms"] for table in tables])
        of_parts[phase] = centered_rows(times, np.zeros(len(times)), np.nanmin)
    return [
        HeatMap(part, trace.ranks, numbers, np.maximum(behind, 0.0))
        for part, behind in of_parts.items()
        if not np.isnan(behind).all()
    ]


def heat_levels(values: list[Floats]) -> Floats:
    """Return the levels of heat maps that share them: each is twice the one before, the last one is exceeded by the
    largest values.

    Values are milliseconds, NaN where not recorded. There is one level fewer than LEVEL_COLORS, ascending: 1, 2 or 5
    times a power of ten, times 1, 2, 4, 8."""
    recorded = np.concatenate([rows[~np.isnan(rows)] for rows in values])
    top = float(np.percentile(recorded, _TOP_PERCENTILE)) if len(recorded) else 0.0
    count = len(LEVEL_COLORS) - 1
    step = max(top / 2 ** (count - 1), _MIN_STEP_MS)
    power = 10 ** math.floor(math.log10(step))
    nice = max(factor for factor in (1, 2, 5) if factor * power <= step * (1 + 1e-9))
    levels: Floats = nice * power * 2.0 ** np.arange(count)
    return levels
