"""Collectives that ranks have in common, and their waiting for each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

# The operation in the name of a kernel: ncclDevKernel_AllReduce_Sum_f32_RING_LL(...).
# The algorithm may differ by rank.
_OPERATION = re.compile(r"(?:nccl|rccl)\w*?_([A-Za-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class CollectiveWait:
    """Waiting of one rank in collectives, over the whole trace. A collective ends at
    about the same time on all ranks, so the rank on which it is shortest came last.
    Only lengths are compared: clocks of hosts need not agree."""

    rank: int
    # Sum over collectives of the time on this rank less the shortest time on any rank.
    wait_ms: float
    last: int  # Number of collectives for which this rank came last.


@dataclass(frozen=True)
class CollectiveSkew:
    """Waiting of ranks in their common collectives."""

    count: int  # Number of collectives compared.
    waits: list[CollectiveWait]  # An entry per rank that has such collectives.


@once_per_trace
def collective_skew(trace: Trace) -> CollectiveSkew | None:
    """Compare the n-th collective of one rank with the n-th of every other in each
    process group, or in all ranks where kernels do not name theirs.

    Groups whose ranks did not launch the same operations in the same order are left
    out. None unless at least two ranks of a group recorded collectives."""
    count = 0
    waits: dict[int, CollectiveWait] = {}
    for group in common_collectives(trace, trace.ranks):
        lengths = np.stack(
            [
                (table["end_ns"] - table["start_ns"]).to_numpy(np.int64)
                for table in group.values()
            ]
        )
        count += lengths.shape[1]
        waited = (lengths - lengths.min(axis=0)).sum(axis=1)
        last = np.bincount(lengths.argmin(axis=0), minlength=len(lengths))
        for rank, wait, times in zip(group, waited, last, strict=True):
            before = waits.get(rank, CollectiveWait(rank, 0.0, 0))
            waits[rank] = CollectiveWait(
                rank, before.wait_ms + wait / 1e6, before.last + int(times)
            )
    return (
        CollectiveSkew(count, [waits[rank] for rank in sorted(waits)])
        if count
        else None
    )


def common_collectives(
    trace: Trace, ranks: Sequence[int]
) -> list[dict[int, pd.DataFrame]]:
    """Return the collectives of each process group that its ranks share.

    At least two ranks of a group recorded the same. They are given by rank in the order
    of their launches, as rows of `main_kernels`.
    """
    if len(ranks) < 2:
        return []
    tables = {rank: _collectives(trace, rank) for rank in ranks}
    if all(table["group"].isna().all() for table in tables.values()):
        groups = [tables]
    else:
        names = {
            str(name)
            for table in tables.values()
            for name in table["group"].dropna().unique()
        }
        members = [
            {rank: table[table["group"] == name] for rank, table in tables.items()}
            for name in sorted(names)
        ]
        groups = [
            {rank: table for rank, table in group.items() if len(table)}
            for group in members
        ]
    return [group for group in groups if _are_the_same(group)]


def _collectives(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the collectives of a rank in the order of their launches."""
    import pandas as pd

    rows = trace.columns(rank, "kernels")
    on_main = rows.equal("device", main_device(trace, rank))
    own = np.flatnonzero(on_main & rows.equal("kind", "communication"))
    launches = np.where(
        rows.recorded("launch_ns"), rows.ints("launch_ns"), rows.ints("start_ns")
    )
    own = own[np.argsort(launches[own], kind="stable")]
    columns: dict[str, Any] = {
        name: rows.texts(name)[own] for name in ("name", "group")
    }
    columns |= {
        "start_ns": rows.ints("start_ns")[own],
        "end_ns": rows.ints("end_ns")[own],
    }
    # The index is the index of `main_kernels`.
    return pd.DataFrame(columns, index=(np.cumsum(on_main) - 1)[own])


def _are_the_same(group: dict[int, pd.DataFrame]) -> bool:
    names = [[str(name) for name in table["name"]] for table in group.values()]
    operations = {
        tuple(m[1].lower() if (m := _OPERATION.search(name)) else name for name in own)
        for own in names
    }
    return len(group) > 1 and len(operations) == 1 and bool(operations.pop())
