"""Activity of the GPU of each rank in an iteration."""

from __future__ import annotations

import pandas as pd

from ebbtide.analysis.metrics.activity.phase_activity import phase_activity
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.profiler.trace import Trace


@once_per_trace
def iteration_activity(trace: Trace, phase: str | None = None) -> pd.DataFrame:
    """Return milliseconds per iteration, medians over the steady iterations: a row per rank with recorded kernels.

    Columns are those of `phase_activity` without iteration and phase. Kernels of several phases may run at once, so
    `compute` and `communication` count such time once for each phase.

    Args:
        trace: The trace.
        phase: A phase; None: all of them.
    """
    rows = {}
    for rank in trace.ranks:
        table = phase_activity(trace, rank)
        table = table[table["iteration"].isin(steady_iterations(trace).numbers)]
        if len(table):
            figures = table.drop(columns=["iteration", "phase"]).where(table["phase"].eq(phase) | (phase is None), 0.0)
            rows[rank] = figures.groupby(table["iteration"]).sum().median()
    return pd.DataFrame.from_dict(rows, orient="index")
