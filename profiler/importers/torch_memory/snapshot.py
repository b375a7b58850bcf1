"""Snapshots of torch's CUDA allocator: what `torch.cuda.memory._dump_snapshot()` writes, gzipped or not."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.rank_names import rank_of
from ebbtide.profiler.importers.torch_memory.sandboxed_unpickler import ACTIONS, STATES
from ebbtide.profiler.importers.torch_memory.snapshot_tables import read_tables
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

FORMAT = "torch-snapshot"

# The year 2112; no device has more than these many numbers or bytes, nor are this many bytes ever handed out.
_MOST_US = 1 << 52
_MOST_DEVICES = 1024
_MOST_BYTES = 1 << 48
_MOST_SUM = float(1 << 62)
_MOST_NOTES = 3

_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def matches(source: Source) -> bool:
    """Any pickle: nothing else here is one, and what is wrong with it is for `read` to say."""
    return source.head[0] == 0x80 and source.head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def read(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add the lines `requested` and `reserved` of each device in the snapshot. Its times are Unix.

    A snapshot has the events that were recorded, or the last of them, and the blocks and segments at its end. So each
    line ends at what is in use then, and starts at that less what the events added: what was allocated before is in
    it. `requested` falls where a release is asked for, as torch's allocated_bytes do (its active_bytes fall when the
    release is completed; both in CUDACachingAllocator.cpp); where only completed ones were recorded, with them.
    Raises SourceError for what is no snapshot, has no events, or is of a rank that another snapshot is of.
    """
    tables = read_tables(source)
    events, blocks, segments = (tables[table] for table in ("events", "blocks", "segments"))
    if events.empty:
        raise SourceError(
            f"{source} has no events, only what was allocated in the end: "
            "call torch.cuda.memory._record_memory_history() before what is to be recorded"
        )
    _check(source, tables)
    rank = rank_of(source, builder, FORMAT, number)
    span = int(events["time_us"].min()) * 1000, int(events["time_us"].max()) * 1000
    reserved = segments.groupby("device")["bytes"].sum()
    activity = events["device"].value_counts().reindex(reserved.index.union(events["device"].unique()), fill_value=0)
    for device in activity.sort_values(ascending=False, kind="stable").index:
        snapshot = _Device(source, builder, rank, f"cuda:{device}", span, events[events["device"] == device])
        snapshot.requested(blocks[blocks["device"] == device])
        snapshot.line("reserved", _RESERVED, int(reserved.get(device, 0)))
        snapshot.out_of_memory()
    builder.note(f"{source.path.name} is a memory snapshot: it tells no phases and nothing of the link")


class _Device:
    """One device of a snapshot, on its way into the trace. span: Unix ns of the events of all devices."""

    def __init__(
        self,
        source: Source,
        builder: TraceBuilder,
        rank: RankBuilder,
        name: str,
        span: tuple[int, int],
        events: pd.DataFrame,
    ) -> None:
        self._file = source.path.name
        self._builder = builder
        self._rank = rank
        self._name = name
        self._events = events
        # They stand in the order in which they happened, which the clocks of several cores may blur.
        self._times = np.maximum.accumulate(events["time_us"].to_numpy(np.int64)) * 1000
        # Its first events may have been dropped: before those that are there, nothing is known.
        self._span = (int(self._times[0]) if len(events) else span[0], span[1])
        if all(device["device"] != name for device in rank.meta["devices"]):
            rank.meta["devices"].append({"device": name, "kind": "cuda", "capacity_bytes": None})

    def requested(self, blocks: pd.DataFrame) -> None:
        by_request = bool((self._events["action"] == ACTIONS["free_requested"]).any())
        states = ["active_allocated"] if by_request else ["active_allocated", "active_awaiting_free"]
        held = blocks[blocks["state"].isin([STATES[state] for state in states])]
        requested, blocked = held["requested"].sum(), held["bytes"].sum()
        release = "free_requested" if by_request else "free_completed"
        self.line("requested", {"alloc": 1, release: -1}, int(requested))
        if blocked > requested:
            self._note(
                "requested is what tensors asked for; the blocks that hold them are larger, "
                f"at the end {blocked / 1e6:,.1f} MB for {requested / 1e6:,.1f} MB"
            )

    def line(self, pool: str, signs: dict[str, int], end: int) -> None:
        """Add a line that the actions in `signs` raise or lower, and that ends at `end` bytes."""
        sign = np.zeros(len(ACTIONS), np.int64)
        sign[[ACTIONS[action] for action in signs]] = list(signs.values())
        signed = sign[self._events["action"]]
        changes = (signed * self._events["bytes"])[signed != 0]
        sums = np.concatenate([[0], changes.cumsum()])
        missing = int(sums[-1] - sums.min()) - end
        if missing > 0 and (changes >= 0).all():
            self._note(f"no {pool} line: its releases were not recorded")
            return
        if missing > 0:
            self._note(f"the events do not lead to what was in use at the end: {pool} may lie too low")
        self._rank.extend(
            "memory",
            t_ns=np.concatenate([self._span[:1], self._times[signed != 0], self._span[1:]]),
            device=self._name,
            pool=pool,
            bytes=np.append(sums, sums[-1]) + (end - sums[-1] + max(missing, 0)),
        )

    def out_of_memory(self) -> None:
        failed = self._events[self._events["action"] == ACTIONS["oom"]]
        for t_us, size in failed[["time_us", "bytes"]].head(_MOST_NOTES).itertuples(index=False):
            at = datetime.fromtimestamp(t_us // 1_000_000, UTC)
            self._note(f"out of memory at {at:%Y-%m-%d %H:%M:%S} UTC, when {size / 1e9:.2f} GB were asked for")
        if len(failed) > _MOST_NOTES:
            self._note(f"out of memory {len(failed) - _MOST_NOTES} more times")

    def _note(self, what: str) -> None:
        self._builder.note(f"{self._file}, {self._name}: {what}")


def _check(source: Source, tables: dict[str, pd.DataFrame]) -> None:
    """Raise SourceError for numbers that no allocator counts, so that none overflow."""
    most = {"device": _MOST_DEVICES, "time_us": _MOST_US, "bytes": _MOST_BYTES, "requested": _MOST_BYTES}
    columns = [item for table in tables.values() if len(table) for item in table.items()]
    for column, values in columns:
        if column not in most:
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= most[column]:
            raise source.damaged(f"it has {low if low < 0 else high} for {column}")
        if most[column] == _MOST_BYTES and values.astype(float).sum() >= _MOST_SUM:
            raise source.damaged("its sizes add up to more than any device has")
