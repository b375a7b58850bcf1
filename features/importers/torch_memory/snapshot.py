"""Imports snapshots of torch's CUDA allocator: files of
`torch.cuda.memory._dump_snapshot()`, gzipped or not."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice

from ebbtide.features.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.profiler.memory_snapshot.allocations import (
    allocation_rows,
    allocator_state,
    blocks_in_use,
    pool_timeline,
    start_ns,
)
from ebbtide.profiler.memory_snapshot.reader import (
    Snapshot,
    SnapshotError,
    read_snapshot,
)
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_MAX_NOTES = 3
_RANK = re.compile(r"(?<![a-z])rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)


class SnapshotImporter:
    """Importer of memory snapshots."""

    format = "torch-snapshot"
    recognition = Recognition.MAGIC_BYTES
    stage = Stage.MEMORY

    def matches(self, source: Source) -> bool:
        # Any pickle: no other format is one, and `import_into` says what is wrong with
        # it.
        return source.head[0] == 0x80 and source.head[1:2] in (
            b"\x02",
            b"\x03",
            b"\x04",
            b"\x05",
        )

    def import_into(
        self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions
    ) -> list[Source]:
        return [
            s
            for number, s in enumerate(sources)
            if not import_snapshot(s, builder, number)
        ]


def import_snapshot(source: Source, builder: TraceBuilder, number: int) -> bool:
    """Add the allocations of each device in a snapshot.

    Add also the pools `requested` and `reserved`. `number`: the rank if no file name
    contains one. Returns whether the times are Unix times.
    """
    try:
        snapshot = read_snapshot(source.open)
    except SnapshotError as error:
        raise source.damaged(error) from None
    if not snapshot.events and snapshot.segments.empty:
        raise SourceError(f"{source} has no events and no memory")
    rank = rank_of(source, builder, SnapshotImporter.format, number)
    numbers = {*snapshot.segments["device"].tolist(), *snapshot.events}
    failures = {device: snapshot.events_of(device).count("oom") for device in numbers}
    devices = sorted(
        numbers,
        key=lambda device: (
            not failures[device],
            -len(snapshot.events_of(device)),
            device,
        ),
    )
    if len(devices) > 1:
        reason = "ran out of memory" if failures[devices[0]] else "has most events"
        builder.note(
            f"{source.path.name} has {len(devices)} devices: figures are of "
            f"cuda:{devices[0]}, which {reason}; the tables have all of them"
        )
    for device in devices:
        importer = _DeviceSnapshot(source, builder, rank, snapshot, device)
        importer.add_state()
        if snapshot.events:
            importer.add_memory()
            importer.add_out_of_memory()
    if not snapshot.events:
        builder.note(
            f"{source.path.name} has no events, only the memory at its end, at time 0: "
            "for its course, call "
            "torch.cuda.memory._record_memory_history() before the steps to record"
        )
    _add_annotations(rank, snapshot)
    builder.note(
        f"{source.path.name} is a memory snapshot: it has no phases and no link figures"
    )
    if snapshot.events and not snapshot.has_times:
        builder.note(
            f"{source.path.name} has no times (torch records them since 2.2): times "
            "are numbers of events, 1 us each"
        )
    return snapshot.has_times


def _add_annotations(rank: RankBuilder, snapshot: Snapshot) -> None:
    """Add the ranges that torch and the job named, for example steps of optimizers."""
    started: dict[tuple[str, int], int] = {}
    for name, stage, device, t_us in snapshot.annotations:
        if stage == "START":
            started[name, device] = t_us
        elif (name, device) in started:
            rank.add(
                "annotations",
                start_ns=started.pop((name, device)) * 1000,
                end_ns=t_us * 1000,
                name=name,
            )


class _DeviceSnapshot:
    """Adds one device of a snapshot to the trace."""

    def __init__(
        self,
        source: Source,
        builder: TraceBuilder,
        rank: RankBuilder,
        snapshot: Snapshot,
        device: int,
    ) -> None:
        self._file = source.path.name
        self._builder = builder
        self._rank = rank
        self._snapshot = snapshot
        self._device, self._name = device, f"cuda:{device}"
        self._events = snapshot.events_of(device)
        if all(entry["device"] != self._name for entry in rank.meta["devices"]):
            rank.meta["devices"].append(
                {"device": self._name, "kind": "cuda", "capacity_bytes": None}
            )

    def add_state(self) -> None:
        """Add the segments at the end; without events also the size of each pool."""
        state = allocator_state(self._snapshot, self._device)
        self._rank.meta.setdefault("allocators", []).append(
            {"device": self._name, **state}
        )
        if not self._snapshot.events:
            for pool in ("requested", "allocated", "reserved"):
                self._rank.memory(0, state[f"{pool}_bytes"], pool, self._name)

    def add_memory(self) -> None:
        """Add the pools `requested` and `reserved`, and each allocation."""
        if self._add_pool("requested"):
            rows = allocation_rows(
                self._snapshot, self._device, start_ns(self._snapshot, self._device)
            )
            self._rank.extend(
                "allocations", device=self._name, **rows.drop(columns="address")
            )
        self._add_pool("reserved")
        in_use = blocks_in_use(self._snapshot, self._device)
        requested, blocked = (
            f"{in_use[sizes].sum() / 1e6:,.1f} MB" for sizes in ("requested", "bytes")
        )
        if blocked != requested:
            counted = (
                "`requested` counts the sizes that tensors requested, and their blocks "
                "are larger"
            )
            self._note(f"{counted}: at the end {blocked} for {requested}")

    def _add_pool(self, pool: str) -> bool:
        """Add the size of a pool over time, and return whether it is known."""
        timeline = pool_timeline(self._snapshot, self._device, pool)
        if timeline.missing_bytes and not timeline.has_releases:
            self._note(f"no {pool} timeline: its releases were not recorded")
            return False
        if timeline.missing_bytes:
            self._note(
                f"the events do not add up to the memory in use at the end: {pool} may "
                "be too low"
            )
        self._rank.extend(
            "memory",
            t_ns=timeline.t_ns,
            device=self._name,
            pool=pool,
            bytes=timeline.bytes,
        )
        return True

    def add_out_of_memory(self) -> None:
        """Add the first failed allocations, with a note for each.

        One more note has the number of the others.
        """
        failures = (
            row
            for block in self._events.blocks("oom")
            for row in block[["time_us", "bytes"]].tolist()
        )
        for t_us, size in islice(failures, _MAX_NOTES):
            error = {"t_ns": t_us * 1000, "device": self._name, "requested_bytes": size}
            self._rank.meta.setdefault("out_of_memory", []).append(error)
            moment = (
                f"{datetime.fromtimestamp(t_us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S} "
                "UTC"
            )
            moment = moment if self._events.have_times else f"event {t_us}"
            self._note(
                f"out of memory at {moment}, when {size / 1e9:.2f} GB were requested"
            )
        if others := sum(1 for _ in failures):
            self._note(f"out of memory {others} more times")

    def _note(self, text: str) -> None:
        self._builder.note(f"{self._file}, {self._name}: {text}")


def rank_of(
    source: Source, builder: TraceBuilder, format: str, number: int
) -> RankBuilder:
    """Return the builder of the rank of a file, and mark it as imported. The name of
    the file or of its folder may contain the rank (`rank-0`, `rank0`, `rank_0`); else
    it is `number`."""
    in_names = {int(digits) for digits in _RANK.findall(source.path.name)}
    folder = _RANK.fullmatch(source.path.absolute().parent.name)
    if not in_names and folder:
        in_names = {int(folder.group(1))}
    rank = in_names.pop() if len(in_names) == 1 else number
    entry = builder.rank(rank)
    files: dict[str, str] = entry.meta.setdefault("imported", {})
    if format in files:
        raise SourceError(
            f"{files[format]} and {source} are both of rank {rank}: import one of "
            "them, or put the rank into the file "
            "names (rank-0, rank-1)"
        )
    files[format] = source.path.name
    return entry
