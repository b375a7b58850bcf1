"""Memory timelines of torch's profiler: `export_memory_timeline` to `.raw.json.gz`, or to `.json` and `.json.gz`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory.rank_names import rank_of
from ebbtide.profiler.trace import TraceBuilder

FORMAT = "memory-timeline"

# In the order of torch.profiler._memory_profiler._CATEGORY_TO_INDEX.
CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail", "unknown"
)  # fmt: skip

Ints = npt.NDArray[np.int64]
# Times in ns, bytes.
Line = tuple[Ints, Ints]

_Ns = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_Us = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 52)]
_Action = Annotated[int, msgspec.Meta(ge=1, le=4)]
_Bytes = Annotated[int, msgspec.Meta(gt=-(1 << 48), lt=1 << 48)]
_Category = Annotated[int, msgspec.Meta(ge=0, lt=len(CATEGORIES))]
_RAW = msgspec.json.Decoder(list[tuple[_Ns, _Action, _Bytes, _Category]])
# Each row begins with a zero: torch stacks its plots on it.
_Sizes = Annotated[list[_Bytes], msgspec.Meta(min_length=1 + len(CATEGORIES), max_length=1 + len(CATEGORIES))]
_PLOT = msgspec.json.Decoder(tuple[list[_Us], list[_Sizes]])

_RAW_HEAD = re.compile(rb"\s*\[\s*\[\s*-?\d+\s*,\s*[1-4]\s*,\s*-?\d+\s*,\s*[0-7]\s*\]")
_PLOT_HEAD = re.compile(rb"\s*\[\s*\[\s*\d{9,}\s*(?:,\s*\d{9,}\s*)*(?:\]\s*,\s*\[\s*\[\s*0\s*,|,?\s*\d*\Z)")
# Three million events: more than the profiler itself gets through.
_MOST_BYTES = 128 << 20
_UNIX_NS = range(10**18, 4 * 10**18)


def matches(source: Source) -> bool:
    return bool(_RAW_HEAD.match(source.head) or _PLOT_HEAD.match(source.head))


def read(source: Source, builder: TraceBuilder, number: int) -> None:
    """Add the pool `tensors`, and `tensors/CATEGORY` for each category that torch's profiler found.

    A timeline is of one device, and counts the tensors that the profiler saw: by the allocator's block where it saw
    the allocation, by its own size where the tensor was there before. Times are those of torch's profiler: Unix, in
    all versions since 2.1. Raises SourceError for what is no timeline, is empty, or is of a rank that another is of.
    """
    with source.open() as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise SourceError(f"{source} is too large: a memory timeline of over {_MOST_BYTES >> 20} MiB is not read")
    try:
        lines = dict(_plot(data) if _PLOT_HEAD.match(source.head) else _raw(data))
    except (msgspec.MsgspecError, ValueError) as error:
        raise source.damaged(error) from None
    if not lines:
        raise SourceError(f"{source} is a memory timeline with nothing in it: was profile_memory=True given?")
    rank = rank_of(source, builder, FORMAT, number)
    if not rank.meta["devices"]:
        rank.meta["devices"].append({"device": "cuda:0", "kind": "cuda", "capacity_bytes": None})
        builder.note(f"{source.path.name} does not say which device it is of: it is taken for cuda:0")
    if int(lines["tensors"][0][0]) not in _UNIX_NS:
        builder.note(f"{source.path.name}: its times are of no known clock, so they do not fit those of other files")
    for pool, (times, sizes) in lines.items():
        rank.extend("memory", t_ns=times, device=rank.meta["devices"][0]["device"], pool=pool, bytes=sizes)


def _raw(data: bytes) -> Iterator[tuple[str, Line]]:
    """From changes: rows of time ns (-1: there from the start), action, bytes, category. A new version of a tensor is
    two rows, one out of its old category and one into the new."""
    rows = np.array(_RAW.decode(data), np.int64).reshape(-1, 4)
    times, _, changes, category = rows[rows[:, 0].argsort(kind="stable")].T
    seen = times >= 0
    if not seen.any():
        return
    if np.abs(changes).astype(float).sum() >= 2.0**62:
        raise ValueError("its sizes add up to more than any device has")
    times = np.where(seen, times, times[seen][0])
    yield "tensors", _line(times, changes.cumsum())
    for number, name in enumerate(CATEGORIES):
        if (category == number).any():
            yield f"tensors/{name}", _line(times, np.where(category == number, changes, 0).cumsum())


def _plot(data: bytes) -> Iterator[tuple[str, Line]]:
    """From the plot's points: times in us, and the bytes of each category then."""
    points, rows = _PLOT.decode(data)
    if len(points) != len(rows):
        raise ValueError(f"it has {len(points)} times and the sizes of {len(rows)}")
    times, sizes = np.array(points, np.int64) * 1000, np.array(rows, np.int64)
    if not len(times) or times[0] < 0:
        return
    order = times.argsort(kind="stable")
    times, sizes = times[order], sizes[order, 1:]
    yield "tensors", _line(times, sizes.sum(axis=1))
    for name, column in zip(CATEGORIES, sizes.T, strict=True):
        if column.any():
            yield f"tensors/{name}", _line(times, column)


def _line(times: Ints, sizes: Ints) -> Line:
    """The rows where it changes, one per time, the first and the last. Raises ValueError where it falls below zero."""
    last = np.append(times[1:] != times[:-1], True)
    times, sizes = times[last], sizes[last]
    if sizes.min() < 0:
        raise ValueError("more bytes are freed than there were")
    changed = np.append(True, sizes[1:] != sizes[:-1])
    changed[-1] = True
    return times[changed], sizes[changed]
