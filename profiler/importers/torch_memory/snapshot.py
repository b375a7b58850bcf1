"""Imports snapshots of torch's CUDA allocator: files of `torch.cuda.memory._dump_snapshot()`, gzipped or not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.rank_names import rank_of
from ebbtide.profiler.memory_snapshot.allocations import allocation_rows, blocks_in_use
from ebbtide.profiler.memory_snapshot.pools import allocator_state, pool_timeline, start_ns
from ebbtide.profiler.memory_snapshot.reader import Snapshot, SnapshotError, read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_MAX_NOTES = 3


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
    events = snapshot.events
    if events.empty:
        raise SourceError(
            f"{source} has no events, only the allocations at its end: "
            "call torch.cuda.memory._record_memory_history() before the steps to record"
        )
    rank = rank_of(source, builder, SnapshotImporter.format, number)
    devices = np.union1d(snapshot.segments["device"], events["device"])
    activity = events["device"].value_counts().reindex(devices, fill_value=0)
    devices = activity.sort_values(ascending=False, kind="stable").index
    if len(devices) > 1:
        builder.note(
            f"{source.path.name} has {len(devices)} devices: figures are of cuda:{devices[0]}, which has most events; "
            "the tables have all of them"
        )
    for device in devices:
        importer = _DeviceSnapshot(source, builder, rank, snapshot, int(device))
        importer.add_memory()
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
    """

    def __init__(
        self, source: Source, builder: TraceBuilder, rank: RankBuilder, snapshot: Snapshot, device: int
    ) -> None:
        self._file = source.path.name
        self._builder = builder
        self._rank = rank
        self._snapshot = snapshot
        self._device, self._name = device, f"cuda:{device}"
        self._events = snapshot.events[snapshot.events["device"] == device]
        if all(entry["device"] != self._name for entry in rank.meta["devices"]):
            rank.meta["devices"].append({"device": self._name, "kind": "cuda", "capacity_bytes": None})

    def add_memory(self) -> None:
        """Add the pools `requested` and `reserved`, and each allocation."""
        if self._add_pool("requested"):
            rows = allocation_rows(self._snapshot, self._device, start_ns(self._snapshot, self._device))
            self._rank.extend("allocations", device=self._name, **rows.drop(columns="address"))
        self._add_pool("reserved")
        state = {"device": self._name, **allocator_state(self._snapshot, self._device)}
        self._rank.meta.setdefault("allocators", []).append(state)
        in_use = blocks_in_use(self._snapshot, self._device, self._events)
        requested, blocked = in_use["requested"].sum(), in_use["bytes"].sum()
        if blocked > requested:
            self._note(
                "`requested` counts the sizes that tensors requested, and their blocks are larger: at the end "
                f"{blocked / 1e6:,.1f} MB for {requested / 1e6:,.1f} MB"
            )

    def _add_pool(self, pool: str) -> bool:
        """Add the size of a pool over time, and return whether it is known."""
        timeline = pool_timeline(self._snapshot, self._device, pool)
        if timeline.missing_bytes and not timeline.has_releases:
            self._note(f"no {pool} timeline: its releases were not recorded")
            return False
        if timeline.missing_bytes:
            self._note(f"the events do not add up to the memory in use at the end: {pool} may be too low")
        self._rank.extend("memory", t_ns=timeline.t_ns, device=self._name, pool=pool, bytes=timeline.bytes)
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
