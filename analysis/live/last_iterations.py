"""Cuts a trace to its last iterations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.schema import SORT
from ebbtide.profiler.trace.spool_ops import select_rows

# Samples of the link have a window, and those of the GPU's state hold, for so long at most.
_MARGIN_NS = 1_000_000_000
_SAMPLED = ("link", "gpu")


def last_iterations(trace: Trace, count: int) -> Trace:
    """Return the last iterations of a trace, and one before them.

    The one before is warm-up: its start is known by the host's clock alone. So is what is left of the trace's warm-up.

    Args:
        trace: The trace.
        count: How many iterations, counted back from the newest one of any rank.

    Returns:
        The same trace where it has not so many iterations, or none at all.
    """
    spans = {rank: intervals(trace, rank, device_times=False).spans for rank in trace.ranks}
    newest = max((int(rows["iteration"].max()) for rows in spans.values() if len(rows)), default=-1)
    first = newest - count
    oldest = min((int(rows["iteration"].min()) for rows in spans.values() if len(rows)), default=first)
    if oldest >= first:
        return trace
    # A rank that has not got so far begins where its last iteration ended.
    starts = {rank: _start_ns(rows, first) for rank, rows in spans.items()}
    entries = [_with_start(entry, starts[entry["rank"]]) for entry in trace.raw_meta["ranks"]]
    _, warmup = steady_iterations(trace)
    dropped = len({int(i) for rows in spans.values() for i in rows["iteration"] if i < first})
    meta = {**trace.raw_meta, "ranks": entries, "warmup_iterations": max(1, warmup - dropped)}
    return Trace(trace.path, meta, lambda rank, table: _cut(trace.table(rank, table), table, first, starts[rank]))


def _start_ns(spans: pd.DataFrame, first: int) -> int | None:
    later = spans[spans["iteration"] >= first]
    if len(later):
        return int(later["start_ns"].iloc[0])
    return int(spans["end_ns"].iloc[-1]) if len(spans) else None


def _with_start(entry: dict[str, Any], start_ns: int | None) -> dict[str, Any]:
    return entry if start_ns is None else {**entry, "first_iteration_start_ns": start_ns}


def _cut(rows: pd.DataFrame, table: str, first: int, start_ns: int | None) -> pd.DataFrame:
    """Return the rows of a table that belong to the iterations from `first` on, or to times from `start_ns` on."""
    if start_ns is None or rows.empty:
        return rows
    if table in ("phases", "ops", "iteration_marks"):
        later = rows["iteration"].ge(first) | (rows["iteration"].isna() & (rows[SORT[table]] >= start_ns))
        later = later.fillna(False).astype(bool)
        return select_rows(rows, later) if table == "ops" else rows[later].reset_index(drop=True)
    if table == "memory":
        return _memory_from(rows, start_ns)
    if table in _SAMPLED:
        return rows[rows["t_ns"] >= start_ns - _MARGIN_NS].reset_index(drop=True)
    ends = rows["end_ns"].astype("Int64").fillna(np.iinfo(np.int64).max)
    return rows[(ends >= start_ns).to_numpy(bool)].reset_index(drop=True)


def _memory_from(rows: pd.DataFrame, start_ns: int) -> pd.DataFrame:
    """Return the samples of memory from a time on, with the last one of each pool before it."""
    begin = int(np.searchsorted(rows["t_ns"].to_numpy(), start_ns))
    last = ~rows.iloc[:begin].duplicated(["device", "pool"], keep="last")
    return pd.concat([rows.iloc[:begin][last], rows.iloc[begin:]], ignore_index=True)
