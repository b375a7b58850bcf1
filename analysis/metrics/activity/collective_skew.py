"""Waiting of ranks for each other in collectives."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

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
    """Waiting of all ranks in their common collectives.

    Attributes:
        count: Number of collectives compared.
        waits: An entry per rank.
    """

    count: int
    waits: list[CollectiveWait]


def collective_skew(trace: Trace) -> CollectiveSkew | None:
    """Compare the collectives of all ranks, the n-th of one rank with the n-th of every other.

    Returns:
        None unless at least two ranks recorded collectives, and all of them the same operations in the same order of
        launches (ranks of different process groups did not).
    """
    lengths, operations = {}, set()
    for rank in trace.ranks:
        rows = main_kernels(trace, rank)
        rows = rows[rows["kind"] == "communication"]
        rows = rows.assign(launch_ns=rows["launch_ns"].fillna(rows["start_ns"])).sort_values("launch_ns", kind="stable")
        lengths[rank] = (rows["end_ns"] - rows["start_ns"]).to_numpy(np.int64)
        operations.add(tuple(_operation(str(name)) for name in rows["name"]))
    if len(lengths) < 2 or len(operations) != 1 or not operations.pop():
        return None
    table = np.stack([*lengths.values()])
    waits = (table - table.min(axis=0)).sum(axis=1)
    last = np.bincount(table.argmin(axis=0), minlength=len(table))
    entries = [
        CollectiveWait(rank, wait / 1e6, int(times)) for rank, wait, times in zip(lengths, waits, last, strict=True)
    ]
    return CollectiveSkew(table.shape[1], entries)


def _operation(name: str) -> str:
    match = _OPERATION.search(name)
    return match[1].lower() if match else name
