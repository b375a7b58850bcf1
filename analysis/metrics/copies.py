"""Measures the copies of the steady iterations by direction, host memory and phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import copied_iterations, copies
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class CopyStats:
    """Copies of one kind, means over the steady iterations."""

    count: int  # Copies per iteration.
    bytes: float | None  # Bytes per iteration of the copies whose size was recorded; None if there is none.
    busy_ms: float  # Time per iteration in which at least one of them ran.


def steady_copies(trace: Trace) -> pd.DataFrame:
    """Return the copies of each rank in its `copied_iterations`: the table `transfers` with rank, phase, iteration."""
    tables: list[pd.DataFrame] = []
    for rank in trace.ranks:
        rows = copies(trace, rank, None)
        if rows.empty and tables:
            continue
        phases = intervals(trace, rank).with_other
        # The stable sort keeps a phase without length before the phase that begins with it.
        phases = phases.sort_values("start_ns", kind="stable", ignore_index=True)
        index = np.searchsorted(phases["start_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
        rows, index = rows[index >= 0], index[index >= 0]
        inside = rows["start_ns"].to_numpy() < phases["end_ns"].to_numpy()[index]
        own = phases.iloc[index].reset_index(drop=True)
        rows = rows.reset_index(drop=True).assign(rank=rank, phase=own["phase"], iteration=own["iteration"])
        tables.append(rows[inside & rows["iteration"].isin(copied_iterations(trace, rank))])
    return pd.concat(tables)


def copy_stats(
    trace: Trace, rows: pd.DataFrame, direction: str, host_memory: str, phase: str | None = None
) -> CopyStats | None:
    """Return the copies of one kind, of the rank on which they took longest.

    Args:
        rows: Its `steady_copies`.
        direction: `h2d` or `d2h`.
        host_memory: `pinned` or `pageable`.
        phase: A phase; None: all.
    """
    rows = rows[(rows["direction"] == direction) & (rows["host_memory"] == host_memory)]
    if phase is not None:
        rows = rows[rows["phase"] == phase]
    stats = []
    for rank, group in rows.groupby("rank"):
        busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
        count, sized = len(copied_iterations(trace, int(rank))), group["bytes"].dropna()
        size = int(sized.sum()) / count if len(sized) else None
        stats.append(CopyStats(round(len(group) / count), size, busy / 1e6 / count))
    return max(stats, key=lambda kind: kind.busy_ms, default=None)
