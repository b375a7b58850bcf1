"""Reads a memory snapshot in a separate process, which a harmful file may crash."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import ebbtide
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import (
    ACTIONS,
    EVENT_COLUMNS,
    ROWS,
    TABLES,
)

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
_LIMITS = {
    "device": _MAX_DEVICES,
    "time_us": _MAX_US,
    "bytes": _MAX_BYTES,
    "requested": _MAX_BYTES,
}
EVENT_TYPE = np.dtype([*EVENT_COLUMNS.items(), ("position", "q")])


class SnapshotError(ValueError):
    """A file is not a memory snapshot, or is damaged or harmful. The message is the
    reason."""


class Events:
    """The events of a device in order, without events of unknown actions, as arrays
    with the fields EVENT_COLUMNS and `position`.

    They are read block by block from the unpickler's answer, as all of them take too
    much memory.

    Events without times (of torch before 2.2) have their positions as times. `release`:
    the action that ends a block: the request of its release, as in torch's
    `allocated_bytes`; where none was recorded the completed release, as in its
    `active_bytes` (CUDACachingAllocator.cpp).
    """

    def __init__(self, answer: int, rows: range) -> None:
        self._answer, self._rows = answer, rows
        count = -(-rows.stop // ROWS) - rows.start // ROWS
        # The number of events of each action in each block, and their latest time.
        self._counts = np.zeros((count, len(ACTIONS)), np.int64)
        self._latest_us = np.full_like(self._counts, -1)
        totals, starts, lows = Counter[str](), list[int](), list[int]()
        for number in range(count):
            block = self._read(number)
            _check_range(block, totals)
            times, actions = block["time_us"], block["action"]
            starts += times[:1].tolist()
            lows.append(int(times.min(initial=_MAX_US)))
            self._counts[number] = np.bincount(actions, minlength=len(ACTIONS))
            for action in np.flatnonzero(self._counts[number]):
                self._latest_us[number, action] = times[actions == action].max()
        # Whether times are Unix times.
        self.have_times = bool((self._latest_us >= 0).any())
        self.start_us, self.span_us = 0, (0, len(self) - 1)
        if self.have_times:
            self.start_us, self.span_us = (
                starts[0],
                (min(lows), int(self._latest_us.max())),
            )
        if self.span_us[0] < 0:
            raise SnapshotError("some of its events have no times")
        self.release = (
            "free_completed" if self._releases_complete() else "free_requested"
        )

    def __len__(self) -> int:
        return int(self._counts.sum())

    def count(self, action: str) -> int:
        """Return the number of events of an action."""
        return int(self._counts[:, ACTIONS[action]].sum())

    def _releases_complete(self) -> bool:
        """Return whether the recording has completed releases alone.

        A completed release of a block that was allocated before the recording may have
        been requested before it, too.
        """
        if self.count("free_requested") or not self.count("free_completed"):
            return False
        allocated, released = (
            np.concatenate([np.empty(0, np.int64), *(b["address"] for b in blocks)])
            for blocks in (self.blocks("alloc"), self.blocks("free_completed"))
        )
        return bool(np.isin(released, allocated).any())

    def blocks(self, *actions: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the events of some actions, block by block."""
        codes = [ACTIONS[action] for action in actions]
        for number in self._blocks_with(codes):
            yield self._events(number, codes)

    def changes(self, *actions: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the events of some actions, from the last block to the first. Their
        times do not fall, from the first event of all on: clocks of cores differ a
        little."""
        codes = [ACTIONS[action] for action in actions]
        latest_us = np.maximum.accumulate(
            [self.start_us, *self._latest_us[:, codes].max(axis=1)]
        )
        for number in reversed(self._blocks_with(codes)):
            block = self._events(number, codes)
            block["time_us"] = np.maximum.accumulate(
                np.maximum(block["time_us"], latest_us[number])
            )
            yield block

    def _blocks_with(self, codes: list[int]) -> list[int]:
        return np.flatnonzero(self._counts[:, codes].any(axis=1)).tolist()

    def _events(self, number: int, codes: list[int]) -> npt.NDArray[Any]:
        block = self._read(number)
        block["position"] = np.arange(len(block)) + self._counts[:number].sum()
        if not self.have_times:
            block["time_us"] = block["position"]
        return block[np.isin(block["action"], codes)]

    def _read(self, number: int) -> npt.NDArray[Any]:
        """Return the events of a block that are of this device and of known actions."""
        number += self._rows.start // ROWS
        data, offset = os.pread(self._answer, _BLOCK_BYTES, number * _BLOCK_BYTES), 0
        block = np.empty(ROWS, EVENT_TYPE)
        for name, code in EVENT_COLUMNS.items():
            block[name] = np.frombuffer(data, code, ROWS, offset)
            offset += ROWS * np.dtype(code).itemsize
        own = block[
            max(self._rows.start - number * ROWS, 0) : self._rows.stop - number * ROWS
        ]
        understood = own["action"] >= 0
        return own if understood.all() else own[understood]


_NO_EVENTS = Events(-1, range(0))


@dataclass(frozen=True)
class Snapshot:
    """A memory snapshot as integers.

    The names of columns are in `sandboxed_unpickler.TABLES` and `EVENT_COLUMNS`.
    """

    # The events of each device that has some; `stack` is a position in `stacks`, or -1.
    events: dict[int, Events]
    blocks: pd.DataFrame  # Its blocks at the end; `segment` is a row of `segments`.
    # Its segments at the end; `pool` is 1 in a private pool (of a CUDA graph).
    segments: pd.DataFrame
    stacks: list[str]  # Call stacks, the outermost frame in the first line.
    # (name, START or END, device, Unix time in us), in order.
    annotations: list[tuple[str, str, int, int]]

    def events_of(self, device: int) -> Events:
        return self.events.get(device, _NO_EVENTS)

    @property
    def has_times(self) -> bool:
        """Whether it has events, whose times are Unix times."""
        return any(events.have_times for events in self.events.values())

    @property
    def span_ns(self) -> tuple[int, int]:
        """Return the times of the first and the last event of all devices."""
        firsts, lasts = zip(
            *(events.span_us for events in self.events.values()), strict=True
        )
        return min(firsts) * 1000, max(lasts) * 1000


def read_snapshot(
    open_file: Callable[[], AbstractContextManager[IO[bytes]]], seconds: int = _SECONDS
) -> Snapshot:
    """Read a snapshot. `seconds`: CPU time allowed in addition to one second per MB."""
    with ExitStack() as stack:
        answer = stack.enter_context(tempfile.TemporaryFile())
        if _run_unpickler(open_file, answer, seconds):
            raise SnapshotError("opening it crashes, or takes too long")
        snapshot = _read_answer(answer)
        weakref.finalize(snapshot, stack.pop_all().close)
    return snapshot


def _read_answer(answer: IO[bytes]) -> Snapshot:
    end = answer.seek(-8, os.SEEK_END)
    answer.seek(end - int.from_bytes(answer.read(8), "little"))
    head: dict[str, Any] = json.loads(answer.read()[:-8])
    if "error" in head:
        raise SnapshotError(head["error"])
    ends = [0, *accumulate(head["device_events"])]
    rows = {
        device: range(*own)
        for device, own in enumerate(pairwise(ends))
        if own[0] < own[1]
    }
    if max(rows, default=0) >= _MAX_DEVICES:
        raise SnapshotError(f"it has {max(rows)} for device")
    answer.seek(-(-ends[-1] // ROWS) * _BLOCK_BYTES)
    tables = {
        table: pd.DataFrame(
            {
                name: np.frombuffer(answer.read(8 * head["rows"][table]), np.int64)
                for name in columns
            }
        )
        for table, columns in TABLES.items()
    }
    for rows_of_table in tables.values():
        _check_range(rows_of_table.to_records(), Counter())
    events = {
        device: own
        for device in rows
        if len(own := Events(answer.fileno(), rows[device]))
    }
    if len({own.have_times for own in events.values()}) > 1:
        raise SnapshotError("some of its events have no times")
    return Snapshot(
        events,
        **tables,
        stacks=head["stacks"],
        annotations=[tuple(e) for e in head["annotations"]],
    )


def _run_unpickler(
    open_file: Callable[[], AbstractContextManager[IO[bytes]]],
    answer: IO[bytes],
    seconds: int,
) -> int:
    """Run the unpickler on a snapshot, and return its exit code."""
    root = Path(ebbtide.__file__).parents[1]
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(root), str(seconds)]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=answer, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        try:
            with open_file() as file, process.stdin as pipe:
                shutil.copyfileobj(file, pipe, _CHUNK_BYTES)
        except BrokenPipeError:
            # The process stops reading when it knows that the file is invalid. The
            # answer has the reason.
            pass
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _check_range(rows: npt.NDArray[Any], totals: Counter[str]) -> None:
    """Raise SnapshotError for numbers that no allocator counts.

    No sum then overflows. `totals` are the sums over the rows so far. Events without a
    time have the time -1.
    """
    for name in _LIMITS.keys() & {*(rows.dtype.names or ())}:
        values, limit = rows[name], _LIMITS[name]
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if low < (-1 if name == "time_us" else 0) or high >= limit:
            raise SnapshotError(f"it has {low if low < 0 else high} for {name}")
        totals[name] += values.sum(dtype=float)
        if limit == _MAX_BYTES and totals[name] >= _MAX_SUM_BYTES:
            raise SnapshotError("its sizes add up to more than any device has")
