"""The table `ops` as analyses take it: by name, cut at the edges of phases, apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.profiler.trace import Trace

# The host's own clock tells of these; all else is told by the device's.
ON_HOST = ("host", "cpu")


def follow_each_other(ops: pd.DataFrame) -> bool:
    """Whether ops are the sub-steps of DeepSpeed's own step, which the host tells of; a schedule's are the link's too,
    and run beside each other."""
    used = set(ops["resource"])
    return "host" in used and not used & set(DIRECTIONS)


def named_ops(trace: Trace, rank: int) -> pd.DataFrame:
    """The table `ops` with names alone (a schedule's trace calls an operation by its kind and its subgroup), subgroup
    -1 where there is none, and `within`, the name of the parent, empty where there is none."""
    ops = trace.ops(rank)
    names = ops["name"].where(ops["subgroup"].isna(), ops["name"].str.replace(r" \d+$", "", regex=True))
    parents = ops["parent"].fillna(-1).to_numpy(np.int64)
    known = (parents >= 0) & (parents < len(ops))
    within = np.full(len(ops), "", dtype=object)
    within[known] = names.to_numpy(object)[parents[known]]
    return ops.assign(name=names, within=within, subgroup=ops["subgroup"].fillna(-1).astype("int64"))


def op_pieces(trace: Trace, rank: int, iterations: Sequence[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the ops of some iterations, their phases). Ops: those of `named_ops` with phase, iteration, first; one that runs
    on into another phase is cut there, and `first` marks what it began with. Phases: iteration, phase, ms, of the
    iterations that have any op."""
    ops = named_ops(trace, rank)
    of_host = ops["resource"].isin(ON_HOST)
    parts = []
    for rows, device_times in ((ops[of_host], False), (ops[~of_host], True)):
        phases = intervals(trace, rank, device_times).with_other.sort_values("start_ns", kind="stable")
        parts.append(_cut(rows, phases[phases["iteration"].isin(iterations)]))
    found = pd.concat(parts, ignore_index=True)
    phases = intervals(trace, rank, device_times=False).with_other
    phases = phases[phases["iteration"].isin(found["iteration"].unique())]
    lengths = phases.assign(ms=(phases["end_ns"] - phases["start_ns"]) / 1e6)
    return found, lengths.groupby(["iteration", "phase"])["ms"].sum().reset_index()


def _cut(ops: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Ops cut at the edges of phases, which lie apart and in order; without what lies in none, or takes no time."""
    begins, ends = phases["start_ns"].to_numpy(np.int64), phases["end_ns"].to_numpy(np.int64)
    starts, stops = ops["start_ns"].to_numpy(np.int64), ops["end_ns"].to_numpy(np.int64)
    first = np.searchsorted(ends, starts, side="right")
    counts = np.maximum(np.searchsorted(begins, stops, side="left") - first, 0)
    row = np.repeat(np.arange(len(ops)), counts)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    place = first[row] + nth
    start, stop = np.maximum(starts[row], begins[place]), np.minimum(stops[row], ends[place])
    # What takes no time at an edge could lie on either side of it.
    kept = stop > start
    row, place, start, stop = row[kept], place[kept], start[kept], stop[kept]
    found = ops.iloc[row][["name", "resource", "within", "subgroup", "bytes"]].reset_index(drop=True)
    where = phases.iloc[place][["phase", "iteration"]].reset_index(drop=True)
    return pd.concat([found, where], axis=1).assign(start_ns=start, end_ns=stop, first=starts[row] >= begins[place])


def apart(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The rows, of each group only that part of each which no earlier one of the group covers: times can be added."""
    rows = rows.sort_values("start_ns", kind="stable")
    groups = rows.groupby(keys, sort=False)["end_ns"]
    reached = groups.cummax().groupby([rows[key] for key in keys], sort=False).shift(fill_value=np.iinfo(np.int64).min)
    starts = np.minimum(np.maximum(rows["start_ns"], reached), rows["end_ns"])
    return rows.assign(start_ns=starts)
