"""Imports snapshots of torch's CUDA allocator: files of `torch.cuda.memory._dump_snapshot()`, gzipped or not."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.memory_snapshot.reader import (
    Snapshot,
    SnapshotError,
    allocation_rows,
    allocator_state,
    blocks_in_use,
    pool_timeline,
    read_snapshot,
    start_ns,
)
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ACTIONS
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_MAX_NOTES = 3
_RANK = re.compile(r"(?<![a-z])rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
# `cuda1`, `cuda:1`, `cuda-1`, `cuda_1`; not the version in `cuda12.4`.
_DEVICE = re.compile(r"(?<![a-z])cuda[-_:]?(\d{1,3})(?!\d|\.\d)", re.IGNORECASE)
# In the order of torch.profiler._memory_profiler._CATEGORY_TO_INDEX.
CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail", "unknown"
)  # fmt: skip
_Ns = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_Us = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 52)]
_Action = Annotated[int, msgspec.Meta(ge=1, le=4)]
_Bytes = Annotated[int, msgspec.Meta(gt=-(1 << 48), lt=1 << 48)]
_Category = Annotated[int, msgspec.Meta(ge=0, lt=len(CATEGORIES))]
_RAW = msgspec.json.Decoder(list[tuple[_Ns, _Action, _Bytes, _Category]])
# Each row begins with a zero, on which torch stacks its plots.
_Sizes = Annotated[list[_Bytes], msgspec.Meta(min_length=1 + len(CATEGORIES), max_length=1 + len(CATEGORIES))]
_PLOT = msgspec.json.Decoder(tuple[list[_Us], list[_Sizes]])
_RAW_HEAD = re.compile(rb"\s*\[\s*\[\s*-?\d+\s*,\s*[1-4]\s*,\s*-?\d+\s*,\s*[0-7]\s*\]")
_PLOT_HEAD = re.compile(rb"\s*\[\s*\[\s*\d{9,}\s*(?:,\s*\d{9,}\s*)*(?:\]\s*,\s*\[\s*\[\s*0\s*,|,?\s*\d*\Z)")
_PAGE_TITLE = b"GPU Memory Timeline HTML"
# About three million events: more than the profiler itself can process.
_MAX_FILE_BYTES = 128 << 20
_UNIX_NS = range(10**18, 4 * 10**18)
_IntArray = npt.NDArray[np.int64]


class SnapshotImporter:
    """Importer of memory snapshots."""

    format = "torch-snapshot"
    recognition = Recognition.MAGIC_BYTES
    stage = Stage.MEMORY

    def matches(self, source: Source) -> bool:
        # Any pickle: no other format is one, and `import_into` says what is wrong with it.
        return source.head[0] == 0x80 and source.head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        return [s for number, s in enumerate(sources) if not import_snapshot(s, builder, number)]


def import_snapshot(source: Source, builder: TraceBuilder, number: int) -> bool:
    """Add each allocation, and the pools `requested` and `reserved`, of each device in a snapshot.

    `number`: the rank if no file name contains one. Returns whether the times are Unix times."""
    try:
        snapshot = read_snapshot(source.open)
    except SnapshotError as error:
        raise source.damaged(error) from None
    if not snapshot.events and snapshot.segments.empty:
        raise SourceError(f"{source} has no events and no memory")
    rank = rank_of(source, builder, SnapshotImporter.format, number)
    numbers = {*snapshot.segments["device"].tolist(), *snapshot.events}
    devices = sorted(numbers, key=lambda device: (-len(snapshot.events_of(device)), device))
    if len(devices) > 1:
        builder.note(
            f"{source.path.name} has {len(devices)} devices: figures are of cuda:{devices[0]}, which has most events; "
            "the tables have all of them"
        )
    for device in devices:
        importer = _DeviceSnapshot(source, builder, rank, snapshot, device)
        importer.add_state()
        if snapshot.events:
            importer.add_memory()
            importer.add_out_of_memory()
    if not snapshot.events:
        builder.note(
            f"{source.path.name} has no events, only the memory at its end, at time 0: for its course, call "
            "torch.cuda.memory._record_memory_history() before the steps to record"
        )
    _add_annotations(rank, snapshot)
    builder.note(f"{source.path.name} is a memory snapshot: it has no phases and no link figures")
    if snapshot.events and not snapshot.has_times:
        builder.note(
            f"{source.path.name} has no times (torch records them since 2.2): times are numbers of events, 1 us each"
        )
    return snapshot.has_times


def _add_annotations(rank: RankBuilder, snapshot: Snapshot) -> None:
    """Add the ranges that torch and the job named, for example steps of optimizers."""
    started: dict[tuple[str, int], int] = {}
    for name, stage, device, t_us in snapshot.annotations:
        if stage == "START":
            started[name, device] = t_us
        elif (name, device) in started:
            rank.add("annotations", start_ns=started.pop((name, device)) * 1000, end_ns=t_us * 1000, name=name)


class _DeviceSnapshot:
    """Adds one device of a snapshot to the trace."""

    def __init__(
        self, source: Source, builder: TraceBuilder, rank: RankBuilder, snapshot: Snapshot, device: int
    ) -> None:
        self._file = source.path.name
        self._builder = builder
        self._rank = rank
        self._snapshot = snapshot
        self._device, self._name = device, f"cuda:{device}"
        self._events = snapshot.events_of(device)
        if all(entry["device"] != self._name for entry in rank.meta["devices"]):
            rank.meta["devices"].append({"device": self._name, "kind": "cuda", "capacity_bytes": None})

    def add_state(self) -> None:
        """Add the segments at the end; without events also the size of each pool."""
        state = allocator_state(self._snapshot, self._device)
        self._rank.meta.setdefault("allocators", []).append({"device": self._name, **state})
        if not self._snapshot.events:
            for pool in ("requested", "allocated", "reserved"):
                self._rank.memory(0, state[f"{pool}_bytes"], pool, self._name)

    def add_memory(self) -> None:
        """Add the pools `requested` and `reserved`, and each allocation."""
        if self._add_pool("requested"):
            rows = allocation_rows(self._snapshot, self._device, start_ns(self._snapshot, self._device))
            self._rank.extend("allocations", device=self._name, **rows.drop(columns="address"))
        self._add_pool("reserved")
        in_use = blocks_in_use(self._snapshot, self._device)
        requested, blocked = (f"{in_use[sizes].sum() / 1e6:,.1f} MB" for sizes in ("requested", "bytes"))
        if blocked != requested:
            counted = "`requested` counts the sizes that tensors requested, and their blocks are larger"
            self._note(f"{counted}: at the end {blocked} for {requested}")

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

    def add_out_of_memory(self) -> None:
        """Add the first failed allocations, with a note for each, and one for the number of the others."""
        failed = np.flatnonzero(self._events["action"] == ACTIONS["oom"])
        times_us, sizes = (self._events[name][failed[:_MAX_NOTES]].tolist() for name in ("time_us", "bytes"))
        for t_us, size in zip(times_us, sizes, strict=True):
            error = {"t_ns": t_us * 1000, "device": self._name, "requested_bytes": size}
            self._rank.meta.setdefault("out_of_memory", []).append(error)
            moment = f"{datetime.fromtimestamp(t_us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
            moment = moment if self._events.have_times else f"event {t_us}"
            self._note(f"out of memory at {moment}, when {size / 1e9:.2f} GB were requested")
        if len(failed) > _MAX_NOTES:
            self._note(f"out of memory {len(failed) - _MAX_NOTES} more times")

    def _note(self, text: str) -> None:
        self._builder.note(f"{self._file}, {self._name}: {text}")


def device_in_name(source: Source) -> str | None:
    """Return the device in the name of a file, such as `cuda:1` for `timeline-cuda1.raw.json.gz`; None without one."""
    numbers = {int(digits) for digits in _DEVICE.findall(source.path.name)}
    return f"cuda:{numbers.pop()}" if len(numbers) == 1 else None


def rank_of(source: Source, builder: TraceBuilder, format: str, number: int) -> RankBuilder:
    """Return the builder of the rank of a file, and mark it as imported.

    The name of the file or of its folder may contain the rank (`rank-0`, `rank0`, `rank_0`); else it is `number`."""
    in_names = {int(digits) for digits in _RANK.findall(source.path.name)}
    folder = _RANK.fullmatch(source.path.absolute().parent.name)
    if not in_names and folder:
        in_names = {int(folder.group(1))}
    rank = in_names.pop() if len(in_names) == 1 else number
    entry = builder.rank(rank)
    files: dict[str, str] = entry.meta.setdefault("imported", {})
    if format in files:
        raise SourceError(
            f"{files[format]} and {source} are both of rank {rank}: import one of them, or put the rank into the file "
            "names (rank-0, rank-1)"
        )
    files[format] = source.path.name
    return entry


class TimelineImporter:
    """Importer of memory timelines."""

    format = "memory-timeline"
    recognition = Recognition.FIXED_LAYOUT
    stage = Stage.MEMORY

    def matches(self, source: Source) -> bool:
        return bool(_RAW_HEAD.match(source.head) or _PLOT_HEAD.match(source.head) or _is_page(source))

    def import_into(self, builder: TraceBuilder, sources: Sequence[Source], options: ImportOptions) -> list[Source]:
        for number, source in enumerate(sources):
            read_timeline(source, builder, number)
        return []


def read_timeline(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add the pool `tensors`, and `tensors/CATEGORY` for each category in the timeline.

    A timeline is of one device, which the name of the file may contain (`timeline-cuda1.raw.json.gz`). It counts the
    tensors that the profiler saw: by the allocator's block if it saw the allocation, by the tensor's own size if the
    tensor existed before. Times are those of torch's profiler, which are Unix times in all versions since 2.1.

    `number`: the rank if no file name contains one."""
    if _is_page(source):
        raise SourceError(
            f"{source} is a page with a picture, without figures: export the timeline to .raw.json.gz or .json.gz"
        )
    with source.open() as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise SourceError(f"{source} is too large: memory timelines are read up to {_MAX_FILE_BYTES >> 20} MiB")
    try:
        times, sizes = _read_plot(data) if _PLOT_HEAD.match(source.head) else _read_raw(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise source.damaged(error) from None
    if not len(times):
        raise SourceError(f"{source} is an empty memory timeline: record it with profile_memory=True")
    last_of_time = np.append(times[1:] != times[:-1], True)
    times, sizes = times[last_of_time], sizes[last_of_time]
    if sizes.min() < 0:
        raise source.damaged("it frees more bytes than were allocated")
    rank = rank_of(source, builder, TimelineImporter.format, number)
    device = _device(source, rank, builder)
    if int(times[0]) not in _UNIX_NS:
        builder.note(f"{source.path.name}: its times are not Unix times, so they do not match those of other files")
    categories = zip(CATEGORIES, sizes.T, strict=True)
    pools = {"tensors": sizes.sum(axis=1), **{f"tensors/{name}": size for name, size in categories if size.any()}}
    for pool, size in pools.items():
        # The changes, and both ends.
        kept = np.append(True, size[1:] != size[:-1])
        kept[-1] = True
        rank.extend("memory", t_ns=times[kept], device=device, pool=pool, bytes=size[kept])


def _device(source: Source, rank: RankBuilder, builder: TraceBuilder) -> str:
    """Return the device of a timeline: the one in the file's name, else the rank's, else cuda:0."""
    devices: list[dict[str, Any]] = rank.meta["devices"]
    named = device_in_name(source)
    if named is None and not devices:
        builder.note(
            f"{source.path.name} does not state its device: cuda:0 is assumed (put another one into the file's name, "
            "e.g. timeline-cuda1.raw.json.gz)"
        )
    device: str = named or (devices[0]["device"] if devices else "cuda:0")
    if all(entry["device"] != device for entry in devices):
        devices.append({"device": device, "kind": "cuda", "capacity_bytes": None})
    return device


def _is_page(source: Source) -> bool:
    """Return whether a file is what `export_memory_timeline` writes to .html."""
    return b"<html" in source.head[:64] and _PAGE_TITLE in source.head


def _read_raw(data: bytes) -> tuple[_IntArray, _IntArray]:
    """Read changes: rows of time in ns (-1: present from the start), action, bytes, category.

    A new version of a tensor is two rows, one out of its old category and one into the new category. Returns the times,
    and the bytes of each category from each of them on."""
    rows = np.array(_RAW.decode(data), np.int64).reshape(-1, 4)
    times, _, changes, category = rows[rows[:, 0].argsort(kind="stable")].T
    if np.abs(changes).astype(float).sum() >= 2.0**62:
        raise ValueError("its sizes add up to more than any device has")
    by_category = np.where(category[:, None] == np.arange(len(CATEGORIES)), changes[:, None], 0)
    count = len(times) if (times >= 0).any() else 0
    times = np.maximum(times, times[times >= 0].min(initial=np.iinfo(np.int64).max))
    return times[:count], by_category.cumsum(axis=0)[:count]


def _read_plot(data: bytes) -> tuple[_IntArray, _IntArray]:
    """Read the points of a plot: times in us, and the bytes of each category at each time."""
    points, rows = _PLOT.decode(data)
    if len(points) != len(rows):
        raise ValueError(f"it has {len(points)} times but sizes for {len(rows)}")
    times, sizes = np.array(points, np.int64) * 1000, np.array(rows, np.int64).reshape(-1, 1 + len(CATEGORIES))
    order = times.argsort(kind="stable")[: len(times) if points and points[0] >= 0 else 0]
    return times[order], sizes[order, 1:]
