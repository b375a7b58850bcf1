"""Imports snapshots of torch's CUDA allocator: files of `torch.cuda.memory._dump_snapshot()`, gzipped or not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.rank_names import rank_of
from ebbtide.profiler.memory_snapshot.allocations import allocation_rows, blocks_in_use, releases_requested
from ebbtide.profiler.memory_snapshot.reader import Snapshot, SnapshotError, read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_MAX_NOTES = 3

_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class SnapshotImporter:
    """Importer of memory snapshots."""

    format = "torch-snapshot"
    recognition = Recognition.MAGIC_BYTES
    stage = Stage.MEMORY

    def matches(self, source: Source) -> bool:
        # Any pickle: no other format is one, and `import_into` says what is wrong with it.
        return source.head[0] == 0x80 and source.head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        for number, source in enumerate(sources):
            import_snapshot(source, builder, number)
        return []


def import_snapshot(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add each allocation, and the pools `requested` and `reserved`, of each device in a snapshot, in Unix times.

    A snapshot has the recorded events (or the last of them), and the blocks and segments at its end. So each pool ends
    at the size at that moment, and starts at that size minus the changes of the events: it includes what was allocated
    before. `requested` falls when a release is requested, as torch's allocated_bytes do (its active_bytes fall when the
    release is completed; both in CUDACachingAllocator.cpp). If only completed releases were recorded, it falls with
    them.

    Args:
        source: The file.
        builder: The trace so far.
        number: The rank if no file name contains one.

    Raises:
        SourceError: The file is not a snapshot, has no events, or is a second snapshot of one rank.
    """
    try:
        snapshot = read_snapshot(source.open)
    except SnapshotError as error:
        raise source.damaged(error) from None
    events, segments = snapshot.events, snapshot.segments
    if events.empty:
        raise SourceError(
            f"{source} has no events, only the allocations at its end: "
            "call torch.cuda.memory._record_memory_history() before the steps to record"
        )
    rank = rank_of(source, builder, SnapshotImporter.format, number)
    span = int(events["time_us"].min()) * 1000, int(events["time_us"].max()) * 1000
    reserved = segments.groupby("device")["bytes"].sum()
    activity = events["device"].value_counts().reindex(reserved.index.union(events["device"].unique()), fill_value=0)
    devices = activity.sort_values(ascending=False, kind="stable").index
    if len(devices) > 1:
        builder.note(
            f"{source.path.name} has {len(devices)} devices: figures are of cuda:{devices[0]}, which has most events; "
            "the tables have all of them"
        )
    for device in devices:
        importer = _DeviceSnapshot(source, builder, rank, snapshot, int(device), span)
        importer.add_requested()
        importer.add_pool("reserved", _RESERVED, int(reserved.get(device, 0)))
        importer.note_out_of_memory()
    _add_annotations(rank, snapshot)
    builder.note(f"{source.path.name} is a memory snapshot: it has no phases and no link figures")


def _add_annotations(rank: RankBuilder, snapshot: Snapshot) -> None:
    """Add the ranges that torch and the job named, for example steps of optimizers."""
    started: dict[tuple[str, int], int] = {}
    for name, stage, device, t_us in snapshot.annotations:
        if stage == "START":
            started[name, device] = t_us
        elif (name, device) in started:
            rank.add("annotations", start_ns=started.pop((name, device)) * 1000, end_ns=t_us * 1000, name=name)


class _DeviceSnapshot:
    """Adds one device of a snapshot to the trace.

    Args:
        source: The file.
        builder: The trace so far.
        rank: Builder of the snapshot's rank.
        snapshot: The snapshot.
        device: Number of the device.
        span_ns: First and last Unix time of the events of all devices.
    """

    def __init__(
        self,
        source: Source,
        builder: TraceBuilder,
        rank: RankBuilder,
        snapshot: Snapshot,
        device: int,
        span_ns: tuple[int, int],
    ) -> None:
        self._file = source.path.name
        self._builder = builder
        self._rank = rank
        self._snapshot = snapshot
        self._device, self._name = device, f"cuda:{device}"
        self._events = snapshot.events[snapshot.events["device"] == device]
        # Events are in their order, but the clocks of several cores may differ a little: times are made monotonic.
        self._times_ns = np.maximum.accumulate(self._events["time_us"].to_numpy(np.int64)) * 1000
        # The first events may have been dropped: nothing is known about the time before the first that is left.
        self._span_ns = (int(self._times_ns[0]) if len(self._times_ns) else span_ns[0], span_ns[1])
        if all(entry["device"] != self._name for entry in rank.meta["devices"]):
            rank.meta["devices"].append({"device": self._name, "kind": "cuda", "capacity_bytes": None})

    def add_requested(self) -> None:
        """Add the pool `requested`, which ends at the requested sizes of the blocks in use, and each allocation."""
        in_use = blocks_in_use(self._snapshot, self._device, self._events)
        requested, blocked = in_use["requested"].sum(), in_use["bytes"].sum()
        release = "free_requested" if releases_requested(self._events) else "free_completed"
        if self.add_pool("requested", {"alloc": 1, release: -1}, int(requested)):
            rows = allocation_rows(self._snapshot, self._device, self._span_ns[0])
            self._rank.extend("allocations", device=self._name, **rows.drop(columns="address"))
        if blocked > requested:
            self._note(
                "`requested` counts the sizes that tensors requested, and their blocks are larger: at the end "
                f"{blocked / 1e6:,.1f} MB for {requested / 1e6:,.1f} MB"
            )

    def add_pool(self, pool: str, signs: dict[str, int], end_bytes: int) -> bool:
        """Add the size of a pool over time, and return whether it is known.

        Args:
            pool: Name of the pool.
            signs: 1 for actions that increase the size, -1 for actions that decrease it.
            end_bytes: Size after the last event.
        """
        sign = np.zeros(len(ACTIONS), np.int64)
        sign[[ACTIONS[action] for action in signs]] = list(signs.values())
        signed = sign[self._events["action"]]
        changes = (signed * self._events["bytes"])[signed != 0]
        sums = np.concatenate([[0], changes.cumsum()])
        missing = int(sums[-1] - sums.min()) - end_bytes
        if missing > 0 and (changes >= 0).all():
            self._note(f"no {pool} timeline: its releases were not recorded")
            return False
        if missing > 0:
            self._note(f"the events do not add up to the memory in use at the end: {pool} may be too low")
        self._rank.extend(
            "memory",
            t_ns=np.concatenate([self._span_ns[:1], self._times_ns[signed != 0], self._span_ns[1:]]),
            device=self._name,
            pool=pool,
            bytes=np.append(sums, sums[-1]) + (end_bytes - sums[-1] + max(missing, 0)),
        )
        return True

    def note_out_of_memory(self) -> None:
        """Add a note for each of the first failed allocations, and one for the number of the others."""
        failed = self._events[self._events["action"] == ACTIONS["oom"]]
        for t_us, size in failed[["time_us", "bytes"]].head(_MAX_NOTES).itertuples(index=False):
            moment = datetime.fromtimestamp(t_us // 1_000_000, UTC)
            self._note(f"out of memory at {moment:%Y-%m-%d %H:%M:%S} UTC, when {size / 1e9:.2f} GB were requested")
        if len(failed) > _MAX_NOTES:
            self._note(f"out of memory {len(failed) - _MAX_NOTES} more times")

    def _note(self, text: str) -> None:
        self._builder.note(f"{self._file}, {self._name}: {text}")
