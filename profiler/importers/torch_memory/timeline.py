"""Imports memory timelines of torch's profiler: `export_memory_timeline` to `.raw.json.gz`, `.json` or `.json.gz`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ebbtide.profiler.importers.importer import ImportOptions, Recognition, Stage
from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.rank_names import device_in_name, rank_of
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

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


class PoolSizes(NamedTuple):
    """Size of a pool over time.

    Attributes:
        times_ns: Times.
        sizes_bytes: Size from each time on.
    """

    times_ns: _IntArray
    sizes_bytes: _IntArray


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

    Args:
        source: The file.
        builder: The trace so far.
        number: The rank if no file name contains one.

    Raises:
        SourceError: The file is not a timeline, is empty, or is a second timeline of one rank.
    """
    if _is_page(source):
        raise SourceError(
            f"{source} is a page with a picture, without figures: export the timeline to .raw.json.gz or .json.gz"
        )
    with source.open() as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise SourceError(f"{source} is too large: memory timelines are read up to {_MAX_FILE_BYTES >> 20} MiB")
    try:
        pools = dict(_read_plot(data) if _PLOT_HEAD.match(source.head) else _read_raw(data))
    except (msgspec.MsgspecError, ValueError) as error:
        raise source.damaged(error) from None
    if not pools:
        raise SourceError(f"{source} is an empty memory timeline: record it with profile_memory=True")
    rank = rank_of(source, builder, TimelineImporter.format, number)
    device = _device(source, rank, builder)
    if int(pools["tensors"].times_ns[0]) not in _UNIX_NS:
        builder.note(f"{source.path.name}: its times are not Unix times, so they do not match those of other files")
    for pool, sizes in pools.items():
        rank.extend("memory", t_ns=sizes.times_ns, device=device, pool=pool, bytes=sizes.sizes_bytes)


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


def _read_raw(data: bytes) -> Iterator[tuple[str, PoolSizes]]:
    """Read changes: rows of time in ns (-1: present from the start), action, bytes, category.

    A new version of a tensor is two rows, one out of its old category and one into the new category.
    """
    rows = np.array(_RAW.decode(data), np.int64).reshape(-1, 4)
    times, _, changes, category = rows[rows[:, 0].argsort(kind="stable")].T
    timed = times >= 0
    if not timed.any():
        return
    if np.abs(changes).astype(float).sum() >= 2.0**62:
        raise ValueError("its sizes add up to more than any device has")
    times = np.where(timed, times, times[timed][0])
    yield "tensors", _pool_sizes(times, changes.cumsum())
    for number, name in enumerate(CATEGORIES):
        if (category == number).any():
            yield f"tensors/{name}", _pool_sizes(times, np.where(category == number, changes, 0).cumsum())


def _read_plot(data: bytes) -> Iterator[tuple[str, PoolSizes]]:
    """Read the points of a plot: times in us, and the bytes of each category at each time."""
    points, rows = _PLOT.decode(data)
    if len(points) != len(rows):
        raise ValueError(f"it has {len(points)} times but sizes for {len(rows)}")
    times, sizes = np.array(points, np.int64) * 1000, np.array(rows, np.int64)
    if not len(times) or times[0] < 0:
        return
    order = times.argsort(kind="stable")
    times, sizes = times[order], sizes[order, 1:]
    yield "tensors", _pool_sizes(times, sizes.sum(axis=1))
    for name, column in zip(CATEGORIES, sizes.T, strict=True):
        if column.any():
            yield f"tensors/{name}", _pool_sizes(times, column)


def _pool_sizes(times: _IntArray, sizes: _IntArray) -> PoolSizes:
    """Keep the changes, one per time, the first and the last. Raise ValueError if the size falls below zero."""
    last = np.append(times[1:] != times[:-1], True)
    times, sizes = times[last], sizes[last]
    if sizes.min() < 0:
        raise ValueError("it frees more bytes than were allocated")
    changed = np.append(True, sizes[1:] != sizes[:-1])
    changed[-1] = True
    return PoolSizes(times[changed], sizes[changed])
