"""Makes rows of `allocations` and `memory` from the events of a snapshot, a block of
events at a time."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.memory_snapshot.reader import EVENT_TYPE, Snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, STATES

POOLS = ("requested", "reserved")
_RESERVED = {
    "segment_alloc": 1,
    "segment_map": 1,
    "segment_free": -1,
    "segment_unmap": -1,
}
_MISSING = np.iinfo(np.int64).min


class PoolTimeline(NamedTuple):
    """Bytes of a pool over time."""

    # Times in Unix ns: the first event, each change, the last event of all devices.
    t_ns: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    # Bytes by which the events would fall below zero, given the size at the end.
    missing_bytes: int
    # Whether the events have releases; if they do not, and bytes are missing, the times
    # say nothing
    has_releases: bool


def pool_timeline(snapshot: Snapshot, device: int, pool: str) -> PoolTimeline:
    """Return the bytes of one of POOLS on a device over time.

    A snapshot has the recorded events (or the last of them), and the blocks and
    segments at its end. So each pool ends at the size at that moment, and starts at
    that size minus the changes of the events: it includes what was allocated before.
    `requested` falls with `Events.release`."""
    events = snapshot.events_of(device)
    if pool == "requested":
        signs, end_bytes = (
            {"alloc": 1, events.release: -1},
            int(blocks_in_use(snapshot, device)["requested"].sum()),
        )
    else:
        segments = snapshot.segments
        signs, end_bytes = (
            _RESERVED,
            int(segments.loc[segments["device"] == device, "bytes"].sum()),
        )
    sign = np.zeros(len(ACTIONS), np.int8)
    sign[[ACTIONS[action] for action in signs]] = list(signs.values())
    # From the end, at which the size is known, to the start.
    row = len(events) + 2
    times, sizes = np.empty((2, row), np.int64)
    size, lowest, has_releases = end_bytes, end_bytes, False
    times[-1], sizes[-1] = snapshot.span_ns[1], size
    for block in events.changes(*signs):
        changes = block["bytes"] * sign[block["action"]]
        has_releases |= bool((changes < 0).any())
        rows = slice(row - 1 - len(block), row - 1)
        times[rows], sizes[rows] = (
            block["time_us"] * 1000,
            size - changes.sum() + np.cumsum(changes),
        )
        size -= int(changes.sum())
        lowest, row = int(sizes[rows].min(initial=min(lowest, size))), rows.start + 1
    times[row - 2], sizes[row - 2] = start_ns(snapshot, device), size
    missing = max(-lowest, 0)
    times, sizes = times[row - 2 :], sizes[row - 2 :]
    sizes += missing
    return PoolTimeline(times, sizes, missing, has_releases)


def start_ns(snapshot: Snapshot, device: int) -> int:
    """Return the Unix time of a device's first event, in ns; of all devices if this one
    has none."""
    own = snapshot.events_of(device)
    return own.start_us * 1000 if len(own) else snapshot.span_ns[0]


def pool_rows(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return columns t_ns, pool and bytes of all POOLS of a device."""
    timelines = {pool: pool_timeline(snapshot, device, pool) for pool in POOLS}
    parts = [
        pd.DataFrame({"t_ns": own.t_ns, "pool": pool, "bytes": own.bytes})
        for pool, own in timelines.items()
    ]
    return pd.concat(parts, ignore_index=True)


def allocator_state(snapshot: Snapshot, device: int) -> dict[str, int]:
    """Return a device's entry of `allocators` in meta.json, on the end of a snapshot
    (docs/trace-format.md)."""
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
        "inactive_bytes": int(
            free.loc[free["segment"].isin(in_use["segment"]), "bytes"].sum()
        ),
        "largest_free_bytes": int(free["bytes"].max()) if len(free) else 0,
    }


def blocks_in_use(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return the blocks of a device that are held at the end of a snapshot."""
    states, blocks = ["active_allocated"], snapshot.blocks
    if snapshot.events_of(device).release == "free_completed":
        states.append("active_awaiting_free")
    return blocks[
        (blocks["device"] == device)
        & blocks["state"].isin([STATES[state] for state in states])
    ]


def allocation_rows(snapshot: Snapshot, device: int, start_ns: int) -> pd.DataFrame:
    """Return each block that a device held at any time of a snapshot.

    At each time they add up to the pool `requested`.

    `start_ns`: the start of blocks that were allocated before the first event. Columns:
    start_ns, end_ns (missing: held at the end), bytes (as requested), address, and
    stack (the text, missing where it was not recorded)."""
    events, live = snapshot.events_of(device), blocks_in_use(snapshot, device)
    row = len(events) + len(live)
    kinds = {"start_ns": "q", "end_ns": "q", "bytes": "q", "address": "q", "stack": "i"}
    columns: dict[str, Any] = {
        name: np.empty(row, kind) for name, kind in kinds.items()
    }

    def prepend(count: int, *values: Any) -> None:
        nonlocal row
        for column, own in zip(columns.values(), values, strict=True):
            column[row - count : row] = own
        row -= count

    # The first one of the later events of each address: the events of one address in
    # turn, each one ends the allocation before it. A release without an allocation
    # before it is of an older block.
    following, older, unfinished = np.empty(0, EVENT_TYPE), [], [np.empty(0, np.int64)]
    for block in events.changes("alloc", events.release):
        rows = np.concatenate([block, following])
        after, before = _neighbors(rows["address"])
        made = rows["action"] == ACTIONS["alloc"]
        own = np.flatnonzero(made[: len(block)])
        new, next_rows = block[own], after[own]
        ends = np.where(next_rows >= 0, rows["time_us"][next_rows] * 1000, _MISSING)
        prepend(
            len(new),
            new["time_us"] * 1000,
            ends,
            new["bytes"],
            new["address"],
            new["stack"],
        )
        unfinished.append(new["address"][next_rows < 0])
        older.append(rows[~made & (before >= 0) & ~made[before]])
        following = rows[before < 0]
    older.append(following[following["action"] != ACTIONS["alloc"]])
    released = np.sort(np.concatenate(older), order="position")
    prepend(
        len(released),
        start_ns,
        released["time_us"] * 1000,
        released["bytes"],
        released["address"],
        -1,
    )
    # Blocks held at the end without an allocation in the events are older than these.
    remaining = live[~live["address"].isin(np.concatenate(unfinished))]
    prepend(
        len(remaining),
        start_ns,
        _MISSING,
        *(remaining[name] for name in ("requested", "address", "stack")),
    )
    columns = {name: column[row:] for name, column in columns.items()}
    columns["end_ns"] = pd.arrays.IntegerArray(
        columns["end_ns"], columns["end_ns"] == _MISSING
    )
    columns["stack"] = pd.Categorical.from_codes(
        columns["stack"], categories=snapshot.stacks
    )
    return pd.DataFrame(columns, copy=False)


def _neighbors(
    address: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the rows of the next and previous event of each event's address, or -1."""
    order = np.argsort(address, kind="stable")
    same = np.flatnonzero(address[order[1:]] == address[order[:-1]])
    after, before = np.full((2, len(address)), -1)
    after[order[same]], before[order[same + 1]] = order[same + 1], order[same]
    return after, before
