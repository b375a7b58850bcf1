"""Times in which the GPU of a rank computes, communicates and copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.timeseries.step_functions import (
    Ints,
    Union,
    intersection,
    merged,
    union,
)
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools

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
    # The time from the first start to the last end of any of these, without the pauses
    # of a recording.
    recorded: Union


@recent_per_trace
def main_kernels(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the rows of the table `kernels` of the rank's first device."""
    rows = trace.kernels(rank)
    return rows[rows["device"] == main_device(trace, rank)].reset_index(drop=True)


class GpuWork(NamedTuple):
    """Kernels or copies of the rank's first device as arrays with an entry each, in
    order of time."""

    starts: Ints  # ns
    ends: Ints  # ns
    launches: Ints  # ns; any number where not recorded.
    launched: Bools  # Whether the launch was recorded.
    streams: Ints  # -1 where not recorded.
    kinds: npt.NDArray[np.object_]

    def only(self, selected: Bools | Ints) -> GpuWork:
        return GpuWork._make(values[selected] for values in self)


@recent_per_trace
def main_work(trace: Trace, rank: int, table: str) -> GpuWork:
    """Return the kernels or copies of a rank's first device.

    `table` is `kernels` or `transfers`.
    """
    rows, kinds = (
        trace.columns(rank, table),
        "kind" if table == "kernels" else "direction",
    )
    starts, ends, launches = (
        rows.ints(name) for name in ("start_ns", "end_ns", "launch_ns")
    )
    streams = np.where(rows.recorded("stream"), rows.ints("stream"), -1)
    work = GpuWork(
        starts, ends, launches, rows.recorded("launch_ns"), streams, rows.texts(kinds)
    )
    return work.only(rows.equal("device", main_device(trace, rank)))


def main_transfers(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the rows of the table `transfers` of the rank's first device."""
    rows = trace.transfers(rank)
    return rows[rows["device"] == main_device(trace, rank)].reset_index(drop=True)


def all_work(trace: Trace, rank: int) -> GpuWork:
    """Return the kernels of the rank's first device, then its copies."""
    work = [main_work(trace, rank, table) for table in ("kernels", "transfers")]
    return GpuWork._make(np.concatenate(columns) for columns in zip(*work, strict=True))


@once_per_trace
def busy_time(trace: Trace, rank: int) -> BusyTime | None:
    """Return the times in which the first device of a rank is busy.

    Return None where kernels were not recorded.
    """
    if not len(trace.columns(rank, "kernels")):
        return None
    kernels, copies = (
        main_work(trace, rank, "kernels"),
        main_work(trace, rank, "transfers"),
    )
    of_kinds = {kind: kernels.only(kernels.kinds == kind) for kind in KINDS}
    if not len(of_kinds["compute"].starts) and not len(
        of_kinds["communication"].starts
    ):
        return None
    times = {kind: union(rows.starts, rows.ends) for kind, rows in of_kinds.items()}
    times["copy"] = merged(times["copy"], union(copies.starts, copies.ends))
    busy = merged(*times.values())
    recorded = busy[0][:1], busy[1][-1:]
    if spans := trace.rank(rank).transfers_spans_ns:
        # Work that was launched in a span may end after it.
        starts, ends = np.array(spans, np.int64).T
        recorded = merged(intersection(recorded, (starts, ends)), busy)
    return BusyTime(**times, all=busy, recorded=recorded)
