"""Waiting of ranks for each other in collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.metrics.activity.busy_time import main_kernels
from ebbtide.profiler.trace import Trace

# The operation in the name of a kernel: ncclDevKernel_AllReduce_Sum_f32_RING_LL(...). The algorithm may differ by rank.
_OPERATION = re.compile(r"(?:nccl|rccl)\w*?_([A-Za-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class CollectiveWait:
    """Waiting of one rank in collectives, over the whole trace.

    A collective ends at about the same time on all ranks, so the rank on which it is shortest came last, and the others
    waited for it. This compares lengths only, so clocks of hosts need not agree.

    Attributes:
        rank: The rank.
        wait_ms: Sum over collectives of the time on this rank less the shortest time on any rank.
        last: Number of collectives for which this rank came last.
    """

    rank: int
    wait_ms: float
    last: int


@dataclass(frozen=True)
class CollectiveSkew:
    """Waiting of ranks in their common collectives.

    Attributes:
        count: Number of collectives compared.
        waits: An entry per rank that has such collectives.
    """

    count: int
    waits: list[CollectiveWait]


def collective_skew(trace: Trace) -> CollectiveSkew | None:
    """Compare the collectives that ranks have in common, the n-th of one rank with the n-th of every other.

    Ranks have those of a process group in common, where kernels name their group. Else all ranks are one group. The
    result is None unless at least two ranks of a group recorded collectives, and all of them the same operations in the
    same order of launches. Groups of which this is not true are left out.
    """
    tables = {rank: _collectives(trace, rank) for rank in trace.ranks}
    if all(table["group"].isna().all() for table in tables.values()):
        groups = [tables]
    else:
        names = {str(name) for table in tables.values() for name in table["group"].dropna().unique()}
        members = [{rank: table[table["group"] == name] for rank, table in tables.items()} for name in sorted(names)]
        groups = [{rank: table for rank, table in group.items() if len(table)} for group in members]
    count = 0
    waits: dict[int, CollectiveWait] = {}
    for group in groups:
        lengths = _common_lengths(group)
        if lengths is None:
            continue
        count += lengths.shape[1]
        waited = (lengths - lengths.min(axis=0)).sum(axis=1)
        last = np.bincount(lengths.argmin(axis=0), minlength=len(lengths))
        for rank, wait, times in zip(group, waited, last, strict=True):
            before = waits.get(rank, CollectiveWait(rank, 0.0, 0))
            waits[rank] = CollectiveWait(rank, before.wait_ms + wait / 1e6, before.last + int(times))
    return CollectiveSkew(count, [waits[rank] for rank in sorted(waits)]) if count else None


def _collectives(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the collectives of a rank in the order of their launches."""
    rows = main_kernels(trace, rank)
    rows = rows[rows["kind"] == "communication"]
    launches = rows["launch_ns"].fillna(rows["start_ns"])
    return rows.assign(launch_ns=launches).sort_values("launch_ns", kind="stable")


def _common_lengths(group: dict[int, pd.DataFrame]) -> npt.NDArray[np.int64] | None:
    """Return the length of each collective (column) on each rank (row), ns; None where the ranks' operations differ."""
    operations = {tuple(_operation(str(name)) for name in table["name"]) for table in group.values()}
    if len(group) < 2 or len(operations) != 1 or not operations.pop():
        return None
    return np.stack([(table["end_ns"] - table["start_ns"]).to_numpy(np.int64) for table in group.values()])


def _operation(name: str) -> str:
    match = _OPERATION.search(name)
    return match[1].lower() if match else name
