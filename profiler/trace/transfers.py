"""Reads copies between host and device from the Chrome traces of torch's profiler (Kineto)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.trace.schema import frame

# The category of copies in torch, and in torch 1.8.
CATEGORIES = ("gpu_memcpy", "Memcpy")
# "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
_NAME = re.compile(r"Memcpy (HtoD|DtoH)(?: \((\w+) -> (\w+)\))?")
# The name of a slice, which the agent gives it.
_SLICE = re.compile(r"copies-(\d+)-(\d+)\.json$")
_HOST_MEMORY = {"Pinned": "pinned", "Pageable": "pageable"}


class Transfers:
    """Collects the copies between host and device of one trace."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._rows = IntTable("start", "end", "name", "device", "bytes", "stream")

    def add(self, copies: list[Event]) -> None:
        """Add those events that are copies between host and device. All events must be of CATEGORIES."""
        copies = [copy for copy in copies if _NAME.match(copy.name)]
        if copies:
            names = [self._names.setdefault(copy.name, len(self._names)) for copy in copies]
            args = [(copy.args.device, copy.args.bytes, copy.args.stream) for copy in copies]
            self._rows.add(*spans(copies), names, *np.array(args, np.int64).T)

    def table(self, base_ns: int) -> pd.DataFrame:
        """Return the table `transfers`. base_ns: added to the times of the events."""
        rows = self._rows.table()
        names = np.array([*self._names], dtype=object)
        kinds = [_copy_kind(name) for name in names]
        return frame(
            "transfers",
            {
                "start_ns": rows["start"] + base_ns,
                "end_ns": rows["end"] + base_ns,
                "device": "cuda:" + rows["device"].clip(lower=0).astype(str),
                "direction": [kinds[name].direction for name in rows["name"]],
                "bytes": rows["bytes"].astype("Int64").mask(rows["bytes"] == MISSING),
                "host_memory": [kinds[name].host_memory for name in rows["name"]],
                "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING),
                "name": names[rows["name"]],
            },
        )


class _CopyKind(NamedTuple):
    direction: str
    host_memory: str | None


def _copy_kind(name: str) -> _CopyKind:
    """Return what the name of a copy says: its direction and, where it says that, its kind of host memory."""
    kind, source, target = _NAME.match(name).groups()  # type: ignore[union-attr]
    if kind == "HtoD":
        return _CopyKind("h2d", _HOST_MEMORY.get(source))
    return _CopyKind("d2h", _HOST_MEMORY.get(target))


def read(paths: Iterable[Path], wall_to_monotonic_ns: int) -> tuple[pd.DataFrame, list[str]]:
    """Read the table `transfers` from Chrome traces.

    Args:
        paths: The files.
        wall_to_monotonic_ns: Added to their times, which are Unix times.

    Returns:
        The table, and a line for each file that could not be read, or not completely.
    """
    tables = [frame("transfers")]
    problems = []
    for path in paths:
        transfers = Transfers()
        try:
            with path.open("rb") as file:
                trace = ChromeTrace(file)
                for batch in trace.batches():
                    transfers.add([event for event in batch if event.cat in CATEGORIES and event.ts is not UNSET])
        except (OSError, ValueError) as error:
            problems.append(f"the copies in {path.name} could not be read ({error})")
            continue
        tables.append(transfers.table(trace.base_ns + wall_to_monotonic_ns))
        if trace.stop_reason or trace.skipped:
            problems.append(
                f"the copies in {path.name} could not all be read ({trace.stop_reason or 'some are damaged'})"
            )
    return frame("transfers", pd.concat(tables)), problems


def spans_of(paths: Iterable[Path], phases: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the spans of time, in ns, in which copies were recorded, from the names of their files.

    The agent starts a slice just after an iteration ends: it covers the time from that end on.

    Args:
        paths: The files.
        phases: The table `phases` of the process.

    Returns:
        (start, end) of each span, ascending and disjoint.
    """
    phase_ends = np.sort(phases["end_ns"].to_numpy(np.int64))
    slices = sorted((int(match[1]), int(match[2])) for path in paths if (match := _SLICE.search(path.name)))
    spans: list[tuple[int, int]] = []
    for start, end in slices:
        before = phase_ends[: np.searchsorted(phase_ends, start, side="right")]
        start = int(before[-1]) if len(before) else start
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans
