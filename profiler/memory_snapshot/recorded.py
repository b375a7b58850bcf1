"""Reads the allocations that a recorded job captured, with what the job knew of its blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ebbtide.profiler.memory_snapshot.allocations import allocation_rows
from ebbtide.profiler.memory_snapshot.pools import pool_rows
from ebbtide.profiler.memory_snapshot.profiled import profiled_events
from ebbtide.profiler.memory_snapshot.reader import SnapshotError, read_snapshot

_NEVER = np.iinfo(np.int64).max


class RecordedAllocations(NamedTuple):
    """Allocations of a process.

    Attributes:
        allocations: Rows of the table `allocations`.
        memory: Rows of the table `memory`: pools `requested` and `reserved` on CUDA, `tensors` on the CPU.
    """

    allocations: pd.DataFrame
    memory: pd.DataFrame


def read_recorded(description_file: Path) -> RecordedAllocations:
    """Read the two files of a capture (profiler/agent/allocation_capture.py), in times of the monotonic clock.

    Raises:
        OSError, ValueError: A file cannot be read.
    """
    description: dict[str, Any] = json.loads(description_file.read_bytes())
    path = description_file.with_name(Path(description["file"]).name)
    shift_ns, device = int(description["wall_to_monotonic_ns"]), str(description["device"])
    owners = [(int(t_ns), pd.DataFrame(blocks, columns=_OWNER_COLUMNS)) for t_ns, blocks in description["owners"]]
    if path.suffix == ".json":
        rows = _profiled_rows(path, shift_ns, owners)
        memory = _timeline(rows).assign(pool="tensors")
    else:
        number = int(device.rpartition(":")[2])
        try:
            snapshot = read_snapshot(lambda: path.open("rb"))
        except SnapshotError as error:
            raise ValueError(str(error)) from None
        rows = allocation_rows(snapshot, number, int(snapshot.events["time_us"].min()) * 1000)
        memory = pool_rows(snapshot, number)
        for table, columns in ((rows, ("start_ns", "end_ns")), (memory, ("t_ns",))):
            for column in columns:
                table[column] += shift_ns
    rows = _with_owners(rows, owners)
    rows["module"] = rows["module"].where(rows["module"].notna(), _modules(rows, description["calls"]))
    return RecordedAllocations(rows.drop(columns="address").assign(device=device), memory.assign(device=device))


_OWNER_COLUMNS = ["address", "bytes", "category", "module"]


def _profiled_rows(path: Path, shift_ns: int, owners: list[tuple[int, pd.DataFrame]]) -> pd.DataFrame:
    """Return the blocks of the CPU: those allocated in the profile, and older ones that the job owned when it began."""
    events = profiled_events(path)
    events["t_ns"] += shift_ns
    end_ns = events.groupby("address")["t_ns"].shift(-1, fill_value=_NEVER)
    made = events[events["bytes"] > 0].assign(end_ns=end_ns).rename(columns={"t_ns": "start_ns"})
    start_ns = owners[0][0]
    older = owners[0][1].assign(start_ns=start_ns, stack=None)
    older["end_ns"] = [_last_owned(address, made, owners) for address in older["address"]]
    columns = ["start_ns", "end_ns", "bytes", "address", "stack"]
    rows = pd.concat([older[columns], made[columns].astype({"stack": object})], ignore_index=True)
    rows["end_ns"] = rows["end_ns"].astype("Int64").mask(rows["end_ns"] == _NEVER)
    return rows.astype({"start_ns": "int64", "bytes": "int64", "stack": "category"})


def _last_owned(address: int, made: pd.DataFrame, owners: list[tuple[int, pd.DataFrame]]) -> int:
    """Return when a block that is older than the profile was seen last; `_NEVER` if it was there at the end.

    Its release is not in the profile. It was released before another block was allocated at its address.
    """
    again = made.loc[made["address"] == address, "start_ns"]
    limit = int(again.min()) if len(again) else _NEVER
    seen = owners[0][0]
    for t_ns, blocks in owners:
        if t_ns >= limit or not (blocks["address"] == address).any():
            return seen
        seen = t_ns
    return _NEVER


def _with_owners(rows: pd.DataFrame, owners: list[tuple[int, pd.DataFrame]]) -> pd.DataFrame:
    """Add category and module of the blocks that the job owned: by address, at a time when the block was there."""
    category = np.full(len(rows), None, dtype=object)
    module = np.full(len(rows), None, dtype=object)
    ends = rows["end_ns"].fillna(_NEVER).to_numpy(np.int64)
    starts, addresses = rows["start_ns"].to_numpy(np.int64), rows["address"].to_numpy()
    for t_ns, blocks in owners:
        by_address = blocks.drop_duplicates("address").set_index("address")
        live = np.flatnonzero((starts <= t_ns) & (ends > t_ns) & np.isin(addresses, by_address.index))
        entries = by_address.loc[addresses[live]]
        category[live], module[live] = entries["category"].to_numpy(), entries["module"].to_numpy()
    return rows.assign(category=pd.Series(category, dtype=object), module=pd.Series(module, dtype=object))


def _modules(rows: pd.DataFrame, calls: list[tuple[int, str | None]]) -> pd.Series:
    """Return the innermost module whose forward ran when each block was allocated; None outside of modules."""
    times, innermost = [], []
    stack: list[str | None] = []
    for t_ns, name in calls:
        if name is not None:
            stack.append(name)
        elif stack:
            stack.pop()
        times.append(t_ns)
        innermost.append(stack[-1] if stack else None)
    position = np.searchsorted(np.array(times, np.int64), rows["start_ns"].to_numpy(np.int64), side="right")
    return pd.Series(np.array([None, *innermost], dtype=object)[position], index=rows.index, dtype=object)


def _timeline(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the sum of the blocks over time."""
    released = rows[rows["end_ns"].notna()]
    times = np.concatenate([rows["start_ns"], released["end_ns"].to_numpy(np.int64)])
    changes = np.concatenate([rows["bytes"], -released["bytes"]])
    order = np.argsort(times, kind="stable")
    times, sizes = times[order], changes[order].cumsum()
    last = np.append(times[1:] != times[:-1], True)[: len(times)]
    return pd.DataFrame({"t_ns": times[last], "bytes": sizes[last]})
