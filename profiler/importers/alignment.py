"""Checks that the files of a trace share their time, or moves them so that they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from ebbtide.units import ms_text

# Value of `--align` with which all files begin with the first one.
START = "start"
# Files this close count as overlapping: monitors take a sample a second, and clocks of hosts differ a little.
_MAX_GAP_NS = 10**9
_SPAN_COLUMNS = ("start_ns", "end_ns", "t_ns")
_META_TIMES = ("first_iteration_start_ns", "started_ns")


@dataclass(frozen=True)
class _Addition:
    """The rows that one file added to one rank.

    Attributes:
        path: The file.
        entry: Builder of the rank.
        parts: The rows, and columns of rows.
        meta_times: Names of the times that it set in the rank's metadata.
    """

    path: Path
    entry: RankBuilder
    parts: list[dict[str, Any]]
    meta_times: list[str]

    def span_ns(self) -> tuple[int, int] | None:
        """Return the first and last time of the rows; None if there are none."""
        times = [
            pd.Series(part[column]).dropna().to_numpy(np.int64)
            for part in self.parts
            for column in _SPAN_COLUMNS
            if column in part
        ]
        times = [values for values in times if values.size]
        return (int(min(map(np.min, times))), int(max(map(np.max, times)))) if times else None

    def shift(self, offset_ns: int) -> None:
        """Move the rows in time."""
        for part in self.parts:
            for column, values in part.items():
                # Not a time: the length of a sample's window.
                if column.endswith("_ns") and column != "window_ns" and values is not None:
                    part[column] = values + offset_ns
        for name in self.meta_times:
            self.entry.meta[name] += offset_ns


class FileTimes:
    """Records which file added which rows to a trace.

    Args:
        builder: The trace so far.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._additions: list[_Addition] = []
        self._known_parts: set[int] = set()
        self._known_meta: dict[int, set[str]] = {}

    def add(self, format: str, sources: Sequence[Source]) -> None:
        """Record what the importer of a format has just added from its files."""
        for rank, entry in self._builder.ranks.items():
            parts = [part for part in entry.parts() if id(part) not in self._known_parts]
            self._known_parts.update(map(id, parts))
            names = {name for name in _META_TIMES if entry.meta.get(name) is not None}
            new_names = names - self._known_meta.get(rank, set())
            self._known_meta[rank] = names
            if parts:
                self._additions.append(_Addition(_source_of(entry, format, sources), entry, parts, sorted(new_names)))

    def check(self) -> None:
        """Raise SourceError if some files share no time with the others."""
        spans = [(*span, addition.path) for addition in self._additions if (span := addition.span_ns()) is not None]
        spans.sort(key=lambda item: item[:2])
        reached, last = spans[0][1:] if spans else (0, Path())
        for start, end, path in spans[1:]:
            if start > reached + _MAX_GAP_NS:
                raise SourceError(
                    f"{path} begins {ms_text((start - reached) / 1e6)} after {last} has ended: they share no time. If "
                    f"they are of one run on clocks that differ, pass --align {START} (all files begin at once)"
                )
            if end > reached:
                reached, last = end, path

    def align(self, reference: str) -> None:
        """Move all files so that they begin with a reference.

        Args:
            reference: `start` for the first file with times, or the path of a file.

        Raises:
            SourceError: The reference is none of the files.
        """
        begins: dict[Path, int] = {}
        for addition in self._additions:
            span = addition.span_ns()
            if span is not None:
                begins[addition.path] = min(span[0], begins.get(addition.path, span[0]))
        chosen = next(iter(begins), None) if reference == START else Path(reference)
        if chosen is not None and chosen not in begins:
            raise SourceError(f"--align {reference}: name one of the files, or {START}")
        for addition in self._additions:
            if chosen is not None and addition.path in begins:
                addition.shift(begins[chosen] - begins[addition.path])


def _source_of(entry: RankBuilder, format: str, sources: Sequence[Source]) -> Path:
    """Return the file of a format that a rank was imported from: the first one where several were."""
    names = {entry.meta.get("imported_from"), entry.meta.get("imported", {}).get(format)}
    return next((source.path for source in sources if source.path.name in names), sources[0].path)
