"""Which rank a file is of, where nothing but its name can tell."""

from __future__ import annotations

import re

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

_RANK = re.compile(r"(?<![a-z])rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)


def rank_of(source: Source, builder: TraceBuilder, format: str, number: int) -> RankBuilder:
    """The rank that the file's name has in it, or its folder's is (`rank-0`, `rank0`, `rank_0`), else `number`.

    Raises SourceError where another file of the format is of that rank already.
    """
    told = {int(digits) for digits in _RANK.findall(source.path.name)}
    folder = _RANK.fullmatch(source.path.absolute().parent.name)
    if not told and folder:
        told = {int(folder.group(1))}
    rank = told.pop() if len(told) == 1 else number
    entry = builder.rank(rank)
    files: dict[str, str] = entry.meta.setdefault("imported", {})
    if format in files:
        raise SourceError(
            f"{files[format]} and {source} are both of rank {rank}: import one of them, or name them by their ranks, "
            "like rank-0 and rank-1"
        )
    files[format] = source.path.name
    return entry
