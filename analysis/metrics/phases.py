"""What memory and link did in each phase of each iteration."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import memory_line
from ebbtide.analysis.metrics.iterations import PHASES, intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, both_busy, traffic
from ebbtide.analysis.timeseries.step_functions import peak_between
from ebbtide.profiler.trace import Trace


@once_per_trace
def phase_peaks(trace: Trace, rank: int, pool: str) -> pd.DataFrame:
    """The peak of a pool per iteration (index) and phase (columns), bytes; NaN where nothing was recorded."""
    pieces = intervals(trace, rank, device_times=False).with_other
    starts, ends = pieces["start_ns"].to_numpy(np.int64), pieces["end_ns"].to_numpy(np.int64)
    peaks = pieces.assign(peak=peak_between(*memory_line(trace, rank, pool), starts, ends))
    return peaks.groupby(["iteration", "phase"])["peak"].max().unstack().reindex(columns=list(PHASES))


@once_per_trace
def link_table(trace: Trace, rank: int) -> pd.DataFrame:
    """A row per iteration, phase and direction: iteration, phase, direction, length_ms, bytes, busy_ms (time in which
    copies ran), both_ms (in both directions at once). NaN for what was not recorded, or too little of it."""
    pieces = intervals(trace, rank).with_other
    starts, ends = pieces["start_ns"].to_numpy(np.int64), pieces["end_ns"].to_numpy(np.int64)
    both = both_busy(trace, rank)
    both_ms = np.nan if both is None else (both(ends) - both(starts)) / 1e6
    tables = []
    for way in DIRECTIONS:
        moved = traffic(trace, rank, way)
        busy = moved.busy if moved is not None else None
        figures = {
            "direction": way,
            "length_ms": (ends - starts) / 1e6,
            "both_ms": both_ms,
            "bytes": np.nan if moved is None else moved.bytes(starts, ends),
            "busy_ms": np.nan if busy is None else (busy(ends) - busy(starts)) / 1e6,
        }
        tables.append(pieces.assign(**figures))
    groups = pd.concat(tables).groupby(["iteration", "phase", "direction"], sort=False)
    figures = groups[["length_ms", "bytes", "busy_ms", "both_ms"]]
    # A sum is known where each of its parts is.
    return figures.sum().where(figures.count().eq(groups.size(), axis=0)).reset_index()


def phase_bytes(trace: Trace, rank: int, direction: str) -> pd.DataFrame | None:
    """Bytes moved per iteration (index) and phase (columns); 0 for a phase that an iteration does not have, NaN where
    too little was sampled, None where neither copies nor counters were recorded."""
    if traffic(trace, rank, direction) is None:
        return None
    rows = link_table(trace, rank)
    rows = rows[rows["direction"] == direction]
    table = rows.set_index(["iteration", "phase"])["bytes"].unstack(fill_value=0.0)
    return table.reindex(columns=list(PHASES), fill_value=0.0)
