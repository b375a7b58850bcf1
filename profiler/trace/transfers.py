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
# The categories of calls of the runtime, by which the host launches work.
CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
# No copy has so many bytes, and no trace has so many copies that their sum overflows.
_MAX_BYTES = 1 << 44
# "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
_NAME = re.compile(r"Memcpy (HtoD|DtoH)(?: \((\w+) -> (\w+)\))?")
# The name of a slice, which the agent gives it.
_SLICE = re.compile(r"copies-(\d+)-(\d+)\.json$")
_HOST_MEMORY = {"Pinned": "pinned", "Pageable": "pageable"}


class Transfers:
    """Collects the copies between host and device of one trace.

    Attributes:
        duplicates: Number of copies that were in the trace twice, known once `table` was called.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._rows = IntTable("start", "end", "name", "device", "bytes", "stream", "correlation")
        self._calls = IntTable("correlation", "bytes")
        self.duplicates = 0

    def add(self, copies: list[Event]) -> None:
        """Add those events that are copies between host and device. All events must be of CATEGORIES."""
        copies = [copy for copy in copies if is_transfer(copy.name)]
        if copies:
            names = [self._names.setdefault(copy.name, len(self._names)) for copy in copies]
            args = [(c.args.device, c.args.bytes, c.args.stream, c.args.correlation) for c in copies]
            self._rows.add(*spans(copies), names, *np.array(args, np.int64).T)

    def add_calls(self, calls: list[Event]) -> None:
        """Add the sizes that calls of CALL_CATEGORIES state: on some ROCm versions only these have them."""
        sizes = [(call.args.correlation, call.args.bytes) for call in calls if call.args.bytes != MISSING]
        if sizes:
            self._calls.add(*np.array(sizes, np.int64).T)

    def table(self, base_ns: int) -> pd.DataFrame:
        """Return the table `transfers`. base_ns: added to the times of the events."""
        rows = self._sized_rows()
        names = np.array([*self._names], dtype=object)
        kinds = [_copy_kind(name) for name in names]
        return frame(
            "transfers",
            {
                "start_ns": rows["start"] + base_ns,
                "end_ns": rows["end"] + base_ns,
                "device": "cuda:" + rows["device"].clip(lower=0).astype(str),
                "direction": [kinds[name].direction for name in rows["name"]],
                "bytes": rows["bytes"].astype("Int64").mask(~rows["bytes"].between(0, _MAX_BYTES)),
                "host_memory": [kinds[name].host_memory for name in rows["name"]],
                "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING),
                "name": names[rows["name"]],
            },
        )

    def _sized_rows(self) -> pd.DataFrame:
        """Return each copy once, with the size that its call states where it has none itself."""
        rows = self._rows.table()
        # One stream runs one copy at a time: the same copy at the same time is the same event.
        distinct = rows.drop_duplicates(ignore_index=True)
        self.duplicates = len(rows) - len(distinct)
        calls = self._calls.table().drop_duplicates("correlation").set_index("correlation")["bytes"]
        stated = distinct["correlation"].map(calls[calls.index > 0]).fillna(MISSING).astype("int64")
        return distinct.assign(bytes=distinct["bytes"].where(distinct["bytes"] != MISSING, stated))


def is_transfer(name: str) -> bool:
    """Return whether a copy of this name is between host and device."""
    return _NAME.match(name) is not None


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
                    timed = [event for event in batch if event.ts is not UNSET]
                    transfers.add([event for event in timed if event.cat in CATEGORIES])
                    transfers.add_calls([event for event in timed if event.cat in CALL_CATEGORIES])
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
