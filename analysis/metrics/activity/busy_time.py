"""Times in which the GPU of a rank computes, communicates and copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.timeseries.step_functions import Union, intersection, merged, union
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("compute", "communication", "copy", "memset")


@dataclass(frozen=True)
class BusyTime:
    """Times in which a GPU runs something, as disjoint intervals in order, ns."""

    compute: Union  # Compute kernels.
    communication: Union  # Collectives.
    copy: Union  # Copies, of any direction.
    memset: Union  # Memory that is set to a value.
    all: Union  # Any of these.
    recorded: Union  # The time from the first start to the last end of any of these, without the pauses of a recording.


@recent_per_trace
def main_kernels(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the rows of the table `kernels` of the rank's first device."""
    rows = trace.kernels(rank)
    return rows[rows["device"] == main_device(trace, rank)].reset_index(drop=True)


@recent_per_trace
def main_transfers(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the rows of the table `transfers` of the rank's first device."""
    rows = trace.transfers(rank)
    return rows[rows["device"] == main_device(trace, rank)].reset_index(drop=True)


@once_per_trace
def busy_time(trace: Trace, rank: int) -> BusyTime | None:
    """Return the times in which the first device of a rank is busy; None where kernels were not recorded."""
    if not len(trace.columns(rank, "kernels")):
        return None
    rows = main_kernels(trace, rank)
    if not rows["kind"].isin(["compute", "communication"]).any():
        return None
    times = {kind: _union(rows[rows["kind"] == kind]) for kind in KINDS}
    times["copy"] = merged(times["copy"], _union(main_transfers(trace, rank)))
    busy = merged(*times.values())
    recorded = busy[0][:1], busy[1][-1:]
    if spans := trace.rank(rank).transfers_spans_ns:
        # Work that was launched in a span may end after it.
        starts, ends = np.array(spans, np.int64).T
        recorded = merged(intersection(recorded, (starts, ends)), busy)
    return BusyTime(**times, all=busy, recorded=recorded)


def _union(rows: pd.DataFrame) -> Union:
    return union(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64))
