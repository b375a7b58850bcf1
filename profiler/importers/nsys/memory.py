"""Device memory that a process holds over time, from its allocations and releases."""

from __future__ import annotations

import pandas as pd

# Memory that the process allocated through CUDA; docs/trace-format.md describes all pools.
POOL = "cuda"


def held_bytes(memory: pd.DataFrame, start: int) -> tuple[pd.DataFrame, int]:
    """Return the bytes that a process holds on one device whenever they change.

    A release of a block whose allocation is not among the rows shows that the block was there from the start.

    Args:
        memory: MEMORY_COLUMNS of one process and device.
        start: Time from which on such blocks count, at the latest the first row's.

    Returns:
        Columns t and bytes, and the bytes that were allocated before the first row.
    """
    rows = memory.sort_values(["address", "t"], kind="stable")
    releases = rows["released"] != 0
    after_allocation = rows["address"].eq(rows["address"].shift()) & ~releases.shift(fill_value=True)
    unknown = releases & ~after_allocation
    earlier = int(rows.loc[unknown, "bytes"].sum())
    changes = rows["bytes"].where(~releases, -rows["bytes"])
    sizes = pd.DataFrame({"t": rows["t"], "change": changes}).sort_values("t", kind="stable")
    if earlier:
        sizes = pd.concat([pd.DataFrame({"t": [start], "change": [earlier]}), sizes])
    sizes = sizes.assign(bytes=sizes["change"].cumsum()).drop_duplicates("t", keep="last")
    return sizes[["t", "bytes"]].reset_index(drop=True), earlier
