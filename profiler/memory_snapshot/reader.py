"""Reads a memory snapshot through a separate process, which a harmful file may crash."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

import ebbtide
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, EVENT_COLUMNS, ROWS, STATES, TABLES

_CHUNK_BYTES = 1 << 20
_PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import main
main(int(sys.argv[2]))"""
_SECONDS = 20
# The year 2112.
_MAX_US = 1 << 52
_MAX_DEVICES = 1024
# No device has this many bytes, and no job allocates this many in sum.
_MAX_BYTES = 1 << 48
_MAX_SUM_BYTES = float(1 << 62)
POOLS = ("requested", "reserved")
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_MISSING = np.iinfo(np.int64).min


class SnapshotError(ValueError):
    """A file is not a memory snapshot, or is damaged or harmful. The message is the reason."""


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as tables of integers, whose names are in `sandboxed_unpickler.TABLES` and `EVENT_COLUMNS`."""

    events: pd.DataFrame  # What the allocator did, in order; `stack` is a position in `stacks`, or -1.
    blocks: pd.DataFrame  # Its blocks at the end; `segment` is a row of `segments`.
    segments: pd.DataFrame  # Its segments at the end; `pool` is 1 in a private pool (of a CUDA graph).
    stacks: list[str]  # Call stacks, the outermost frame in the first line.
    annotations: list[tuple[str, str, int, int]]  # (name, START or END, device, Unix time in us), in order.

    def events_of(self, device: int) -> pd.DataFrame:
        """Return the events of a device, without a copy: they follow each other."""
        numbers = self.events["device"].to_numpy()
        return self.events[slice(*np.searchsorted(numbers, np.array([device, device + 1], numbers.dtype)))]


def read_snapshot(open_file: Callable[[], AbstractContextManager[IO[bytes]]], seconds: int = _SECONDS) -> Snapshot:
    """Read a snapshot.

    `seconds`: CPU time allowed in addition to one second per MB."""
    with tempfile.TemporaryFile() as answer:
        if _run_unpickler(open_file, answer, seconds):
            raise SnapshotError("opening it crashes, or takes too long")
        end = answer.seek(-8, os.SEEK_END)
        answer.seek(end - int.from_bytes(answer.read(8), "little"))
        head: dict[str, Any] = json.loads(answer.read()[:-8])
        if "error" in head:
            raise SnapshotError(head["error"])
        answer.seek(0)
        tables = {"events": _read_events(answer, head["device_events"])}
        for (table, columns), rows in zip(TABLES.items(), head["rows"].values(), strict=True):
            tables[table] = pd.DataFrame({name: np.frombuffer(answer.read(8 * rows), np.int64) for name in columns})
    _check_ranges(tables)
    return Snapshot(**tables, stacks=head["stacks"], annotations=[tuple(entry) for entry in head["annotations"]])


def _read_events(answer: IO[bytes], device_events: list[int]) -> pd.DataFrame:
    """Read the events, without those of unknown actions."""
    count = sum(device_events)
    columns = {name: np.empty(count, np.dtype(code)) for name, code in EVENT_COLUMNS.items()}
    for start in range(0, count, ROWS):
        for column in columns.values():
            part = column[start : start + ROWS]
            part[:] = np.frombuffer(answer.read(part.nbytes), part.dtype)
    columns["device"] = np.repeat(np.arange(len(device_events), dtype=np.int16), device_events)
    understood = columns["action"] >= 0
    if not understood.all():
        columns = {name: column[understood] for name, column in columns.items()}
    return pd.DataFrame(columns, copy=False)


def _run_unpickler(open_file: Callable[[], AbstractContextManager[IO[bytes]]], answer: IO[bytes], seconds: int) -> int:
    """Run the unpickler on a snapshot, and return its exit code."""
    root = Path(ebbtide.__file__).parents[1]
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(root), str(seconds)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        try:
            with open_file() as file, process.stdin as pipe:
                shutil.copyfileobj(file, pipe, _CHUNK_BYTES)
        except BrokenPipeError:
            # The process stops reading when it knows that the file is invalid. The answer has the reason.
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _check_ranges(tables: dict[str, pd.DataFrame]) -> None:
    """Raise SnapshotError for numbers that no allocator counts, so that no sum overflows."""
    limits = {"device": _MAX_DEVICES, "time_us": _MAX_US, "bytes": _MAX_BYTES, "requested": _MAX_BYTES}
    columns = [item for table in tables.values() if len(table) for item in table.items()]
    for column, values in columns:
        if column not in limits:
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limits[column]:
            raise SnapshotError(f"it has {low if low < 0 else high} for {column}")
        if limits[column] == _MAX_BYTES and values.to_numpy().sum(dtype=float) >= _MAX_SUM_BYTES:
            raise SnapshotError("its sizes add up to more than any device has")


class PoolTimeline(NamedTuple):
    """Bytes of a pool over time."""

    t_ns: npt.NDArray[np.int64]  # Times in Unix ns: the first event, each change, the last event of all devices.
    bytes: npt.NDArray[np.int64]
    missing_bytes: int  # Bytes by which the events would fall below zero, given the size at the end.
    has_releases: bool  # Whether the events have releases; if they do not, and bytes are missing, the times say nothing


def pool_timeline(snapshot: Snapshot, device: int, pool: str) -> PoolTimeline:
    """Return the bytes of one of POOLS on a device over time.

    A snapshot has the recorded events (or the last of them), and the blocks and segments at its end. So each pool ends
    at the size at that moment, and starts at that size minus the changes of the events: it includes what was allocated
    before. `requested` falls when a release is requested, as torch's allocated_bytes do (its active_bytes fall when the
    release is completed; both in CUDACachingAllocator.cpp). If only completed releases were recorded, it falls with
    them."""
    events = snapshot.events_of(device)
    if pool == "requested":
        release = "free_requested" if releases_requested(events) else "free_completed"
        signs, end_bytes = {"alloc": 1, release: -1}, int(blocks_in_use(snapshot, device, events)["requested"].sum())
    else:
        segments = snapshot.segments
        signs, end_bytes = _RESERVED, int(segments.loc[segments["device"] == device, "bytes"].sum())
    sign = np.zeros(len(ACTIONS), np.int8)
    sign[[ACTIONS[action] for action in signs]] = list(signs.values())
    signed = sign[events["action"]]
    changing = signed != 0
    changes = events["bytes"].to_numpy()[changing]
    changes *= signed[changing]
    # Millions of events: sums and times are made in place.
    sums, times = np.zeros(len(changes) + 2, np.int64), np.empty(len(changes) + 2, np.int64)
    np.cumsum(changes, out=sums[1:-1])
    del changes
    sums[-1] = sums[-2]
    missing = max(int(sums[-1] - sums.min()) - end_bytes, 0)
    sums += end_bytes - sums[-1] + missing
    times[0], times[-1] = start_ns(snapshot, device), int(snapshot.events["time_us"].max()) * 1000
    times[1:-1] = _times_ns(events, changing)
    return PoolTimeline(times, sums, missing, bool((signed < 0).any()))


def _times_ns(events: pd.DataFrame, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return times of some events of a device, monotonic from its first event on: clocks of cores differ a little."""
    times: npt.NDArray[np.int64] = events["time_us"].to_numpy()[chosen]
    if len(times):
        times[0] = max(times[0], events["time_us"].iloc[0])
        np.maximum.accumulate(times, out=times)
        times *= 1000
    return times


def start_ns(snapshot: Snapshot, device: int) -> int:
    """Return the Unix time of a device's first event, in ns; of the first one of all devices if it has none.

    Earlier events may have been dropped: nothing is known about the time before it."""
    own = snapshot.events_of(device)["time_us"]
    return int(own.iloc[0] if len(own) else snapshot.events["time_us"].min()) * 1000


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
        largest_free_bytes: The largest free block, the most that torch can allocate without a new segment."""
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


def releases_requested(events: pd.DataFrame) -> bool:
    """Return whether the events have the requests of releases, not only the completed releases.

    A block counts as held until its release is requested, as in torch's `allocated_bytes`; its `active_bytes` fall when
    the release is completed (CUDACachingAllocator.cpp)."""
    return bool((events["action"] == ACTIONS["free_requested"]).any())


def blocks_in_use(snapshot: Snapshot, device: int, events: pd.DataFrame) -> pd.DataFrame:
    """Return the blocks of a device that are held at the end of a snapshot. `events`: those of the device."""
    states = ["active_allocated"] if releases_requested(events) else ["active_allocated", "active_awaiting_free"]
    blocks = snapshot.blocks
    return blocks[(blocks["device"] == device) & blocks["state"].isin([STATES[state] for state in states])]


def allocation_rows(snapshot: Snapshot, device: int, start_ns: int) -> pd.DataFrame:
    """Return each block that a device held at any time of a snapshot.

    `start_ns`: the start of blocks that were allocated before the first event, Unix time in ns.

    Returns:
        Columns start_ns, end_ns (missing: held at the end), bytes (as requested), address, and stack (the text, missing
        where it was not recorded). At each time the blocks held add up to the pool `requested`.
    """
    events = snapshot.events_of(device)
    live = blocks_in_use(snapshot, device, events)
    release = ACTIONS["free_requested" if releases_requested(events) else "free_completed"]
    action = events["action"].to_numpy()
    chosen = (action == ACTIONS["alloc"]) | (action == release)
    made = action[chosen] == ACTIONS["alloc"]
    address, size, stack = (events[name].to_numpy()[chosen] for name in ("address", "bytes", "stack"))
    following, after_made = _following(address, made)
    t_ns = _times_ns(events, chosen)
    end_ns = np.where(following >= 0, t_ns[following], _MISSING)[made]
    older = ~made & ~after_made
    # Blocks held at the end without an allocation in the events are older than these.
    remaining = live[~live["address"].isin(address[made & (following < 0)])]
    del following
    unknown = np.full(older.sum() + len(remaining), start_ns)
    ends = np.concatenate([end_ns, t_ns[older], np.full(len(remaining), _MISSING)])
    stacks = np.concatenate([stack[made], np.full(older.sum(), -1, np.int32), remaining["stack"].astype(np.int32)])
    columns = {
        "start_ns": np.concatenate([t_ns[made], unknown]),
        "end_ns": pd.arrays.IntegerArray(ends, ends == _MISSING),
        "bytes": np.concatenate([size[made], size[older], remaining["requested"]]),
        "address": np.concatenate([address[made], address[older], remaining["address"]]),
        "stack": pd.Categorical.from_codes(stacks, categories=snapshot.stacks),
    }
    return pd.DataFrame(columns, copy=False)


def _following(
    address: npt.NDArray[np.int64], made: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the position of the next event of each event's address, or -1, and whether an allocation was before it.

    The events of one address in turn: each one ends the allocation before it."""
    order = np.argsort(address, kind="stable").astype(np.int32)
    in_turn = address[order]
    same = in_turn[1:] == in_turn[:-1]
    del in_turn
    before, after = order[:-1][same], order[1:][same]
    following, after_made = np.full(len(address), -1, np.int32), np.zeros(len(address), bool)
    following[before], after_made[after] = after, made[before]
    return following, after_made
