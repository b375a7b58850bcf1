"""Prepares the table `ops` for analyses: plain names, split at the edges of phases,
without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import overlapping
from ebbtide.phases import OTHER
from ebbtide.profiler.agent.without_gradients import NAME as WITHOUT_GRADIENTS
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

# Resources timed by the host's clock; all others use device times.
ON_HOST = ("host", "cpu", "worker")
# What names of resources of storage begin with; they are timed by the host's clock,
# too.
STORAGE = "storage_"


def run_in_sequence(ops: pd.DataFrame) -> bool:
    """Return whether ops are the sub-steps of DeepSpeed's own step, which follow each
    other on the host, as do forwards without gradients.

    The operations of a schedule also use the link, and run at the same time."""
    used = set(ops["resource"][ops["name"] != WITHOUT_GRADIENTS])
    return len(ops) > 0 and (
        not used or ("host" in used and not used & set(DIRECTIONS))
    )


@once_per_trace
def op_names(trace: Trace, rank: int) -> frozenset[str]:
    """Return the names in the table `ops` of a rank."""
    return frozenset(trace.labels(rank, "ops", "name"))


def named_ops(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the table `ops` with plain names.

    A schedule's names have the number of the subgroup. The subgroup is -1 for None, and
    the column `within` is the name of the parent, empty where there is none.
    """
    ops = trace.ops(rank)
    names = ops["name"].where(
        ops["subgroup"].isna(), ops["name"].str.replace(r" \d+$", "", regex=True)
    )
    parents = ops["parent"].fillna(-1).to_numpy(np.int64)
    has_parent = (parents >= 0) & (parents < len(ops))
    within = np.full(len(ops), "", dtype=object)
    within[has_parent] = names.to_numpy(object)[parents[has_parent]]
    return ops.assign(
        name=names, within=within, subgroup=ops["subgroup"].fillna(-1).astype("int64")
    )


def split_by_phase(
    trace: Trace, rank: int, iterations: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split the ops of some iterations at the edges of phases. Returns rows of
    `named_ops` with phase, iteration and `first` (False for the continuation of an op),
    and iteration, phase, ms of the iterations with any op."""
    import pandas as pd

    ops = named_ops(trace, rank)
    on_host = ops["resource"].isin(ON_HOST) | ops["resource"].str.startswith(STORAGE)
    parts = []
    for rows, device_times in ((ops[on_host], False), (ops[~on_host], True)):
        phases = intervals(trace, rank, device_times).with_other.sort_values(
            "start_ns", kind="stable"
        )
        parts.append(_split(rows, phases[phases["iteration"].isin(iterations)]))
    split = pd.concat(parts, ignore_index=True)
    phases = intervals(trace, rank, device_times=False).with_other
    phases = phases[phases["iteration"].isin(split["iteration"].unique())]
    lengths = phases.assign(ms=(phases["end_ns"] - phases["start_ns"]) / 1e6)
    return split, lengths.groupby(["iteration", "phase"])["ms"].sum().reset_index()


def _split(ops: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Split ops at the edges of disjoint phases in order.

    Leave out parts outside phases and parts without length.
    """
    import pandas as pd

    begins, ends = (
        phases["start_ns"].to_numpy(np.int64),
        phases["end_ns"].to_numpy(np.int64),
    )
    starts, stops = ops["start_ns"].to_numpy(np.int64), ops["end_ns"].to_numpy(np.int64)
    row, phase = overlapping(starts, stops, (begins, ends))
    start, stop = (
        np.maximum(starts[row], begins[phase]),
        np.minimum(stops[row], ends[phase]),
    )
    # A part without length at an edge could belong to either phase.
    kept = stop > start
    row, phase, start, stop = row[kept], phase[kept], start[kept], stop[kept]
    columns = ops.iloc[row][
        ["name", "resource", "within", "subgroup", "bytes"]
    ].reset_index(drop=True)
    owners = phases.iloc[phase][["phase", "iteration"]].reset_index(drop=True)
    return pd.concat([columns, owners], axis=1).assign(
        start_ns=start, end_ns=stop, first=starts[row] >= begins[phase]
    )


def remove_overlaps(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Shorten each row to the part that no earlier row of its group covers.

    Times can then be added.
    """
    rows = rows.sort_values("start_ns", kind="stable")
    groups = rows.groupby(keys, sort=False)["end_ns"]
    reached = (
        groups.cummax()
        .groupby([rows[key] for key in keys], sort=False)
        .shift(fill_value=np.iinfo(np.int64).min)
    )
    starts = np.minimum(np.maximum(rows["start_ns"], reached), rows["end_ns"])
    return rows.assign(start_ns=starts)


@once_per_trace
def without_gradients_ms(trace: Trace, rank: int | None = None) -> float | None:
    """Return the median time of `other` in which forwards without gradients run, on a
    rank, or on the slowest one if it is None.

    None where none were recorded."""
    numbers = steady_iterations(trace).numbers
    longest = np.zeros(len(numbers))
    ranks = [
        one
        for one in trace.ranks
        if rank in (None, one) and WITHOUT_GRADIENTS in op_names(trace, one)
    ]
    for one in ranks:
        rows, _ = split_by_phase(trace, one, numbers)
        rows = remove_overlaps(
            rows[(rows["name"] == WITHOUT_GRADIENTS) & (rows["phase"] == OTHER)],
            ["iteration"],
        )
        sums = (rows["end_ns"] - rows["start_ns"]).groupby(rows["iteration"]).sum()
        longest = np.maximum(
            longest, sums.reindex(numbers, fill_value=0).to_numpy(np.float64) / 1e6
        )
    return median_or_none(longest) if ranks else None
