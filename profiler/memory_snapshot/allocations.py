"""Lifetimes of blocks of device memory, from the events of an allocator."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.memory_snapshot.reader import Snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, STATES

_MISSING = np.iinfo(np.int64).min


def releases_requested(events: pd.DataFrame) -> bool:
    """Return whether the events have the requests of releases, not only the completed releases.

    A block counts as held until its release is requested, as in torch's `allocated_bytes`; its `active_bytes` fall when
    the release is completed (CUDACachingAllocator.cpp).
    """
    return bool((events["action"] == ACTIONS["free_requested"]).any())


def blocks_in_use(snapshot: Snapshot, device: int, events: pd.DataFrame) -> pd.DataFrame:
    """Return the blocks of a device that are held at the end of a snapshot. `events`: those of the device."""
    states = ["active_allocated"] if releases_requested(events) else ["active_allocated", "active_awaiting_free"]
    blocks = snapshot.blocks
    return blocks[(blocks["device"] == device) & blocks["state"].isin([STATES[state] for state in states])]


def allocation_rows(snapshot: Snapshot, device: int, start_ns: int) -> pd.DataFrame:
    """Return each block that a device held at any time of a snapshot.

    Args:
        snapshot: The snapshot.
        device: Number of the device.
        start_ns: The start of blocks that were allocated before the first event, Unix time in ns.

    Returns:
        Columns start_ns, end_ns (missing: held at the end), bytes (as requested), address, and stack (the text, missing
        where it was not recorded). At each time the blocks held add up to the pool `requested`.
    """
    events = snapshot.events[snapshot.events["device"] == device]
    live = blocks_in_use(snapshot, device, events)
    release = ACTIONS["free_requested" if releases_requested(events) else "free_completed"]
    times_ns = np.maximum.accumulate(events["time_us"].to_numpy(np.int64)) * 1000
    events = events.assign(t_ns=times_ns)[events["action"].isin([ACTIONS["alloc"], release]).to_numpy()]
    allocated = (events["action"] == ACTIONS["alloc"]).to_numpy()
    # The events of one address in turn: each one ends the allocation before it.
    by_address = events.assign(allocated=allocated).groupby("address")
    end_ns = by_address["t_ns"].shift(-1, fill_value=_MISSING).to_numpy(np.int64)
    ended_before = ~allocated & ~by_address["allocated"].shift(1, fill_value=False).to_numpy(bool)
    made, older = events[allocated], events[ended_before]
    # Blocks held at the end without an allocation in the events are older than these.
    remaining = live[~live["address"].isin(made.loc[end_ns[allocated] == _MISSING, "address"])]
    rows = pd.DataFrame(
        {
            "start_ns": np.concatenate([made["t_ns"], np.full(len(older) + len(remaining), start_ns)]),
            "end_ns": np.concatenate([end_ns[allocated], older["t_ns"], np.full(len(remaining), _MISSING)]),
            "bytes": np.concatenate([made["bytes"], older["bytes"], remaining["requested"]]),
            "address": np.concatenate([made["address"], older["address"], remaining["address"]]),
            "stack": np.concatenate([made["stack"], np.full(len(older), -1), remaining["stack"]]),
        }
    ).astype("int64")
    stacks = pd.Categorical.from_codes(rows["stack"].to_numpy(), categories=snapshot.stacks)
    return rows.assign(stack=stacks, end_ns=rows["end_ns"].astype("Int64").mask(rows["end_ns"] == _MISSING))
