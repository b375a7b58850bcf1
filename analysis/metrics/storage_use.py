"""Measures what a job reads from and writes to storage, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

DIRECTIONS = ("read", "write")


@dataclass(frozen=True)
class StorageUse:
    """One direction of a rank's storage, medians over the steady iterations."""

    rank: int
    direction: str  # `read` or `write`.
    # Rows of the table `ops` per iteration: one per subgroup and submission.
    requests: float
    bytes: float  # Bytes per iteration.
    gradient_bytes: float  # Of these, the bytes of gradients.
    # Time per iteration in which at least one request was in flight, from submission to
    # the end of the wait for it. The transfer itself may have been shorter.
    in_flight_ms: float
    # Time per iteration in which the job waited for requests of this direction; None
    # where waits were not recorded.
    wait_ms: float | None
    hidden_share: float | None  # Share of `in_flight_ms` in which the job did not wait.


def storage_use(trace: Trace, ranks: Sequence[int] | None = None) -> list[StorageUse]:
    """Return the storage use of some ranks, or of all if None, with both directions of
    each rank that used storage."""
    return [
        use
        for rank in (trace.ranks if ranks is None else ranks)
        for use in rank_storage_use(trace, rank)
    ]


@once_per_trace
def rank_storage_use(trace: Trace, rank: int) -> list[StorageUse]:
    """Return the storage use of one rank in both directions, none if it used none."""
    if (
        not trace.columns(rank, "ops")
        .matches("resource", lambda name: name.startswith("storage"))
        .any()
    ):
        return []
    ops = trace.ops(rank)
    numbers = steady_iterations(trace).numbers
    ops = ops[ops["iteration"].isin(numbers)]
    waits = ops[(ops["name"] == "wait") & (ops["resource"] == "host")]
    requests = ops[ops["resource"].str.startswith("storage")]
    requests = requests.assign(
        direction=requests["resource"].str.extract(r"storage_(\w+)", expand=False)
    )
    uses = []
    for direction in DIRECTIONS:
        own = requests[requests["direction"] == direction]
        wait_ms = (
            _per_iteration(_waits_for(waits, requests, direction), numbers)
            if len(waits)
            else None
        )
        uses.append(_use(rank, direction, own, wait_ms, numbers))
    return uses


def _waits_for(
    waits: pd.DataFrame, requests: pd.DataFrame, direction: str
) -> pd.DataFrame:
    """Return the waits in which requests of a direction ended.

    A wait lasts until all requests of its kind have.
    """
    ends = np.sort(
        requests.loc[requests["direction"] == direction, "end_ns"].to_numpy(np.int64)
    )
    begun, over = (
        np.searchsorted(ends, waits[column].to_numpy(np.int64), "right")
        for column in ("start_ns", "end_ns")
    )
    return waits[over > begun].assign(
        value=lambda rows: (rows["end_ns"] - rows["start_ns"]) / 1e6
    )


def _use(
    rank: int,
    direction: str,
    requests: pd.DataFrame,
    wait_ms: float | None,
    numbers: Sequence[int],
) -> StorageUse:
    sizes = requests.assign(value=requests["bytes"].astype("Float64").fillna(0.0))
    spans = [
        union_length(
            rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
        )
        / 1e6
        for _, rows in requests.groupby("iteration")
    ]
    in_flight_ms = (
        float(np.median([*spans, *[0.0] * (len(numbers) - len(spans))]))
        if numbers
        else 0.0
    )
    hidden = (
        None
        if wait_ms is None or not in_flight_ms
        else max(0.0, 1 - wait_ms / in_flight_ms)
    )
    return StorageUse(
        rank,
        direction,
        requests=_per_iteration(requests.assign(value=1.0), numbers),
        bytes=_per_iteration(sizes, numbers),
        gradient_bytes=_per_iteration(
            sizes[sizes["name"].str.startswith("gradient")], numbers
        ),
        in_flight_ms=in_flight_ms,
        wait_ms=wait_ms,
        hidden_share=hidden,
    )


def _per_iteration(rows: pd.DataFrame, numbers: Sequence[int]) -> float:
    """Return the median over iterations of the sum of the column `value`.

    The sum is 0 in iterations without a row.
    """
    sums = rows.groupby("iteration")["value"].sum().reindex(numbers, fill_value=0.0)
    return float(sums.median()) if len(sums) else 0.0
