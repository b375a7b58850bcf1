"""Reads a memory snapshot through a separate process, which a harmful file may crash."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

import ebbtide
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS, EVENT_COLUMNS, ROWS, STATES, TABLES

_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = ROWS * sum(np.dtype(code).itemsize for code in EVENT_COLUMNS.values())
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


class Events:
    """The events of a device in order: columns of EVENT_COLUMNS, without those of unknown actions.

    A column is read from the unpickler's answer whenever it is asked for: all of them take more memory than the tables
    that are made of them. Events without times (of torch before 2.2) have their positions as times."""

    def __init__(self, answer: int, rows: range) -> None:
        self._answer, self._rows = answer, rows
        self._understood = self._read("action") >= 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._understood))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name == "time_us" and not self.have_times:
            return np.arange(len(self))
        column = self._read(name)
        return column if len(column) == len(self) else column[self._understood]

    @cached_property
    def have_times(self) -> bool:
        """Whether times are Unix times."""
        return bool((self._read("time_us")[self._understood] >= 0).any())

    @cached_property
    def release(self) -> str:
        """The action that ends a block: the request of its release, as in torch's `allocated_bytes`; where none was
        recorded the completed release, as in its `active_bytes` (CUDACachingAllocator.cpp)."""
        return "free_requested" if (self["action"] == ACTIONS["free_requested"]).any() else "free_completed"

    def _read(self, name: str) -> npt.NDArray[Any]:
        names = [*EVENT_COLUMNS]
        offset = ROWS * sum(np.dtype(EVENT_COLUMNS[before]).itemsize for before in names[: names.index(name)])
        first = self._rows.start // ROWS
        blocks = np.empty((-(-self._rows.stop // ROWS) - first, ROWS), EVENT_COLUMNS[name])
        for number, block in enumerate(blocks, first):
            os.preadv(self._answer, [block.data], number * _BLOCK_BYTES + offset)
        return blocks.reshape(-1)[self._rows.start - first * ROWS :][: len(self._rows)]


_NO_EVENTS = Events(-1, range(0))


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as integers; the names of columns are in `sandboxed_unpickler.TABLES` and `EVENT_COLUMNS`."""

    events: dict[int, Events]  # Those of each device that has some; `stack` is a position in `stacks`, or -1.
    blocks: pd.DataFrame  # Its blocks at the end; `segment` is a row of `segments`.
    segments: pd.DataFrame  # Its segments at the end; `pool` is 1 in a private pool (of a CUDA graph).
    stacks: list[str]  # Call stacks, the outermost frame in the first line.
    annotations: list[tuple[str, str, int, int]]  # (name, START or END, device, Unix time in us), in order.

    def events_of(self, device: int) -> Events:
        return self.events.get(device, _NO_EVENTS)

    @property
    def has_times(self) -> bool:
        """Whether it has events, whose times are Unix times."""
        return any(events.have_times for events in self.events.values())

    @cached_property
    def span_ns(self) -> tuple[int, int]:
        """Return the times of the first and the last event of all devices."""
        times = [(int(t.min()) * 1000, int(t.max()) * 1000) for t in (e["time_us"] for e in self.events.values())]
        return min(times)[0], max(last for _, last in times)


def read_snapshot(open_file: Callable[[], AbstractContextManager[IO[bytes]]], seconds: int = _SECONDS) -> Snapshot:
    """Read a snapshot. `seconds`: CPU time allowed in addition to one second per MB."""
    with ExitStack() as stack:
        answer = stack.enter_context(tempfile.TemporaryFile())
        if _run_unpickler(open_file, answer, seconds):
            raise SnapshotError("opening it crashes, or takes too long")
        snapshot = _read_answer(answer)
        _check_ranges(snapshot)
        weakref.finalize(snapshot, stack.pop_all().close)
    return snapshot


def _read_answer(answer: IO[bytes]) -> Snapshot:
    end = answer.seek(-8, os.SEEK_END)
    answer.seek(end - int.from_bytes(answer.read(8), "little"))
    head: dict[str, Any] = json.loads(answer.read()[:-8])
    if "error" in head:
        raise SnapshotError(head["error"])
    ends = [0, *accumulate(head["device_events"])]
    rows = {device: range(*own) for device, own in enumerate(pairwise(ends)) if own[0] < own[1]}
    _check_range("device", np.array([*rows]), _MAX_DEVICES)
    answer.seek(-(-ends[-1] // ROWS) * _BLOCK_BYTES)
    tables = {
        table: pd.DataFrame({name: np.frombuffer(answer.read(8 * head["rows"][table]), np.int64) for name in columns})
        for table, columns in TABLES.items()
    }
    events = {device: own for device in rows if len(own := Events(answer.fileno(), rows[device]))}
    return Snapshot(events, **tables, stacks=head["stacks"], annotations=[tuple(e) for e in head["annotations"]])


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


def _check_ranges(snapshot: Snapshot) -> None:
    """Raise SnapshotError for numbers that no allocator counts, so that no sum overflows."""
    limits = {"device": _MAX_DEVICES, "time_us": _MAX_US, "bytes": _MAX_BYTES, "requested": _MAX_BYTES}
    tables: list[tuple[Any, Any]] = [(table, [*table]) for table in (snapshot.blocks, snapshot.segments)]
    for rows, columns in [*tables, *((events, EVENT_COLUMNS) for events in snapshot.events.values())]:
        for name in filter(columns.__contains__, limits):
            _check_range(name, np.asarray(rows[name]), limits[name])
    if len({events.have_times for events in snapshot.events.values()}) > 1:
        raise SnapshotError("some of its events have no times")


def _check_range(name: str, values: npt.NDArray[Any], limit: int) -> None:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high >= limit:
        raise SnapshotError(f"it has {low if low < 0 else high} for {name}")
    if limit == _MAX_BYTES and values.sum(dtype=float) >= _MAX_SUM_BYTES:
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
    before. `requested` falls with `Events.release`."""
    events = snapshot.events_of(device)
    if pool == "requested":
        signs, end_bytes = {"alloc": 1, events.release: -1}, int(blocks_in_use(snapshot, device)["requested"].sum())
    else:
        segments = snapshot.segments
        signs, end_bytes = _RESERVED, int(segments.loc[segments["device"] == device, "bytes"].sum())
    sign = np.zeros(len(ACTIONS), np.int8)
    sign[[ACTIONS[action] for action in signs]] = list(signs.values())
    signed = sign[events["action"]]
    changing = signed != 0
    changes = events["bytes"][changing]
    changes *= signed[changing]
    # Millions of events: sums and times are made in place.
    sums, times = np.zeros(len(changes) + 2, np.int64), np.empty(len(changes) + 2, np.int64)
    np.cumsum(changes, out=sums[1:-1])
    del changes
    sums[-1] = sums[-2]
    missing = max(int(sums[-1] - sums.min()) - end_bytes, 0)
    sums += end_bytes - sums[-1] + missing
    times[0], times[-1] = start_ns(snapshot, device), snapshot.span_ns[1]
    times[1:-1] = _times_ns(events, changing)
    return PoolTimeline(times, sums, missing, bool((signed < 0).any()))


def _times_ns(events: Events, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return times of some events of a device, monotonic from its first event on: clocks of cores differ a little."""
    all_times = events["time_us"]
    times: npt.NDArray[np.int64] = all_times[chosen]
    if len(times):
        times[0] = max(times[0], all_times[0])
        np.maximum.accumulate(times, out=times)
        times *= 1000
    return times


def start_ns(snapshot: Snapshot, device: int) -> int:
    """Return the Unix time of a device's first event, in ns; of the first one of all devices if it has none."""
    own = snapshot.events_of(device)
    return int(own["time_us"][0]) * 1000 if len(own) else snapshot.span_ns[0]


def pool_rows(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return columns t_ns, pool and bytes of all POOLS of a device."""
    timelines = {pool: pool_timeline(snapshot, device, pool) for pool in POOLS}
    parts = [pd.DataFrame({"t_ns": own.t_ns, "pool": pool, "bytes": own.bytes}) for pool, own in timelines.items()]
    return pd.concat(parts, ignore_index=True)


def allocator_state(snapshot: Snapshot, device: int) -> dict[str, int]:
    """Return the entry of `allocators` in meta.json for a device at the end of a snapshot (docs/trace-format.md)."""
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


def blocks_in_use(snapshot: Snapshot, device: int) -> pd.DataFrame:
    """Return the blocks of a device that are held at the end of a snapshot."""
    states, blocks = ["active_allocated"], snapshot.blocks
    if snapshot.events_of(device).release == "free_completed":
        states.append("active_awaiting_free")
    return blocks[(blocks["device"] == device) & blocks["state"].isin([STATES[state] for state in states])]


def allocation_rows(snapshot: Snapshot, device: int, start_ns: int) -> pd.DataFrame:
    """Return each block that a device held at any time of a snapshot: at each time they add up to the pool `requested`.

    `start_ns`: the start of blocks that were allocated before the first event. Columns: start_ns, end_ns (missing: held
    at the end), bytes (as requested), address, and stack (the text, missing where it was not recorded)."""
    events = snapshot.events_of(device)
    live = blocks_in_use(snapshot, device)
    action = events["action"]
    chosen = (action == ACTIONS["alloc"]) | (action == ACTIONS[events.release])
    made = action[chosen] == ACTIONS["alloc"]
    address = events["address"][chosen]
    following, after_made = _following(address, made)
    older = ~made & ~after_made
    # Blocks held at the end without an allocation in the events are older than these.
    remaining = live[~live["address"].isin(address[made & (following < 0)])]

    def of_blocks(values: npt.NDArray[Any], of_remaining: Any) -> npt.NDArray[Any]:
        """Return values of the blocks, given those of events: older blocks first, by their releases."""
        return np.concatenate([np.broadcast_to(of_remaining, len(remaining)), values[older], values[made]])

    columns: dict[str, Any] = {"address": of_blocks(address, remaining["address"])}
    del address
    times = _times_ns(events, chosen)
    ends = np.where(following >= 0, times[following], _MISSING)
    ends[older], times[older] = times[older], start_ns
    ends = of_blocks(ends, _MISSING)
    columns["start_ns"] = of_blocks(times, start_ns)
    columns["end_ns"] = pd.arrays.IntegerArray(ends, ends == _MISSING)
    del following, times
    columns["bytes"] = of_blocks(events["bytes"][chosen], remaining["requested"])
    stacks = events["stack"][chosen]
    stacks[older] = -1
    stacks = of_blocks(stacks, remaining["stack"].astype(np.int32))
    columns["stack"] = pd.Categorical.from_codes(stacks, categories=snapshot.stacks)
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
