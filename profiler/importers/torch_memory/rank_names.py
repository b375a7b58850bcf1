"""Finds the rank and the device of a file whose contents do not state them, from its name."""

from __future__ import annotations

import re

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_RANK = re.compile(r"(?<![a-z])rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
# `cuda1`, `cuda:1`, `cuda-1`, `cuda_1`; not the version in `cuda12.4`.
_DEVICE = re.compile(r"(?<![a-z])cuda[-_:]?(\d{1,3})(?!\d|\.\d)", re.IGNORECASE)


def device_in_name(source: Source) -> str | None:
    """Return the device in the name of a file, such as `cuda:1` for `timeline-cuda1.raw.json.gz`; None without one."""
    numbers = {int(digits) for digits in _DEVICE.findall(source.path.name)}
    return f"cuda:{numbers.pop()}" if len(numbers) == 1 else None


def rank_of(source: Source, builder: TraceBuilder, format: str, number: int) -> RankBuilder:
    """Return the builder of the rank of a file, and mark it as imported.

    Args:
        source: The file. Its name, or the name of its folder, may contain the rank (`rank-0`, `rank0`, `rank_0`).
        builder: The trace so far.
        format: Format of the file.
        number: The rank if no name contains one.

    Raises:
        SourceError: Another file of the format is of the same rank.
    """
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
