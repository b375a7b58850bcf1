"""Computes heat maps of ranks by iterations: by how much each rank is behind the median rank of the iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.ranks.matrices import centered_rows, hosts_of
from ebbtide.analysis.metrics.ranks.rank_series import phase_series
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace

LATE = "late start"


@dataclass(frozen=True)
class HeatMap:
    """Milliseconds by which ranks are behind, of one part of the iteration.

    Attributes:
        part: A phase, whose time is compared; or `late start`: by how much the rank's first phase begins after that of
            the median rank of its host.
        ranks: The ranks, a row each.
        iterations: The steady iterations, a column each.
        behind_ms: Milliseconds above the median rank of the same iteration; 0 where a rank is faster, NaN where not
            recorded.
    """

    part: str
    ranks: list[int]
    iterations: list[int]
    behind_ms: Floats


def heat_maps(trace: Trace) -> list[HeatMap]:
    """Return the heat map of the late start and of each phase that was recorded; none of a single rank."""
    numbers = steady_iterations(trace).numbers
    if len(trace.ranks) < 2 or not numbers:
        return []
    tables = [phase_series(trace, rank) for rank in trace.ranks]
    starts = np.stack([table[[f"{phase}_start_ms" for phase in PHASES]].min(axis=1).to_numpy() for table in tables])
    of_parts = {LATE: centered_rows(starts, hosts_of(trace), np.nanmin)}
    for phase in PHASES:
        times = np.stack([table[f"{phase}_ms"].to_numpy(np.float64) for table in tables])
        of_parts[phase] = centered_rows(times, np.zeros(len(times)), np.nanmin)
    return [
        HeatMap(part, trace.ranks, numbers, np.maximum(behind, 0.0))
        for part, behind in of_parts.items()
        if not np.isnan(behind).all()
    ]
