"""Sizes of the memory pools over time, from the events of an allocator."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.memory_snapshot.allocations import blocks_in_use, releases_requested
from ebbtide.profiler.memory_snapshot.reader import Snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, STATES

POOLS = ("requested", "reserved")
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class PoolTimeline(NamedTuple):
    """Bytes of a pool over time.

    Attributes:
        t_ns: Times in Unix ns: the first event, each change, the last event of all devices.
        bytes: Bytes from each time on.
        missing_bytes: Bytes by which the events would fall below zero, given the size at the end.
        has_releases: Whether the events have releases; if they do not, and bytes are missing, the times say nothing.
    """

    t_ns: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    missing_bytes: int
    has_releases: bool


def pool_timeline(snapshot: Snapshot, device: int, pool: str) -> PoolTimeline:
    """Return the bytes of one of POOLS on a device over time.

    A snapshot has the recorded events (or the last of them), and the blocks and segments at its end. So each pool ends
    at the size at that moment, and starts at that size minus the changes of the events: it includes what was allocated
    before. `requested` falls when a release is requested, as torch's allocated_bytes do (its active_bytes fall when the
    release is completed; both in CUDACachingAllocator.cpp). If only completed releases were recorded, it falls with
    them.
    """
    events = snapshot.events[snapshot.events["device"] == device]
    if pool == "requested":
        release = "free_requested" if releases_requested(events) else "free_completed"
        signs, end_bytes = {"alloc": 1, release: -1}, int(blocks_in_use(snapshot, device, events)["requested"].sum())
    else:
        segments = snapshot.segments
        signs, end_bytes = _RESERVED, int(segments.loc[segments["device"] == device, "bytes"].sum())
    sign = np.zeros(len(ACTIONS), np.int64)
    sign[[ACTIONS[action] for action in signs]] = list(signs.values())
    signed = sign[events["action"]]
    changes = (signed * events["bytes"].to_numpy(np.int64))[signed != 0]
    sums = np.concatenate([[0], changes.cumsum()])
    missing = max(int(sums[-1] - sums.min()) - end_bytes, 0)
    # Events are in their order, but the clocks of several cores may differ a little: times are made monotonic.
    times = np.maximum.accumulate(events["time_us"].to_numpy(np.int64)) * 1000
    first, last = start_ns(snapshot, device), int(snapshot.events["time_us"].max()) * 1000
    return PoolTimeline(
        np.concatenate([[first], times[signed != 0], [last]]),
        np.append(sums, sums[-1]) + (end_bytes - sums[-1] + missing),
        missing,
        bool((changes < 0).any()),
    )


def start_ns(snapshot: Snapshot, device: int) -> int:
    """Return the Unix time of a device's first event, in ns; of the first one of all devices if it has none.

    Earlier events may have been dropped: nothing is known about the time before it.
    """
    events = snapshot.events
    own = events.loc[events["device"] == device, "time_us"]
    return int(own.iloc[0] if len(own) else events["time_us"].min()) * 1000


def pool_rows(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return columns t_ns, pool and bytes of all POOLS of a device."""
    parts = []
    for pool in POOLS:
        timeline = pool_timeline(snapshot, device, pool)
        parts.append(pd.DataFrame({"t_ns": timeline.t_ns, "pool": pool, "bytes": timeline.bytes}))
    return pd.concat(parts, ignore_index=True)


def allocator_state(snapshot: Snapshot, device: int) -> dict[str, int]:
    """Return the segments of a device at the end of a snapshot, in bytes where not a count.

    Keys:
        segments, private_segments: Number of all segments, and of those in private pools (of CUDA graphs).
        reserved_bytes, private_bytes: Bytes of all segments, and of those in private pools.
        allocated_bytes, requested_bytes: Bytes of the blocks in use, and what tensors requested of them.
        inactive_bytes: Bytes of free blocks in segments that also have blocks in use: torch cannot return them.
        largest_free_bytes: The largest free block, the most that torch can allocate without a new segment.
    """
    segments = snapshot.segments[snapshot.segments["device"] == device]
    blocks = snapshot.blocks[snapshot.blocks["device"] == device]
    free = blocks[blocks["state"] == STATES["inactive"]]
    in_use = blocks[blocks["state"] != STATES["inactive"]]
    private = segments[segments["pool"] == 1]
    return {
        "segments": len(segments),
        "private_segments": len(private),
        "reserved_bytes": int(segments["bytes"].sum()),
        "private_bytes": int(private["bytes"].sum()),
        "allocated_bytes": int(in_use["bytes"].sum()),
        "requested_bytes": int(in_use["requested"].sum()),
        "inactive_bytes": int(free.loc[free["segment"].isin(in_use["segment"]), "bytes"].sum()),
        "largest_free_bytes": int(free["bytes"].max()) if len(free) else 0,
    }
