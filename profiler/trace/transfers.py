"""Copies between host and device, from the Chrome traces that torch's profiler writes (Kineto)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import Rows
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.trace.schema import frame

# The category that torch gives copies; the second is that of torch 1.8.
CATEGORIES = ("gpu_memcpy", "Memcpy")
# "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
_NAME = re.compile(r"Memcpy (HtoD|DtoH)(?: \((\w+) -> (\w+)\))?")
_HOST_MEMORY = {"Pinned": "pinned", "Pageable": "pageable"}


class Transfers:
    """Collects the copies between host and device of one trace."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._rows = Rows("start", "end", "name", "device", "bytes", "stream")

    def add(self, copies: list[Event]) -> None:
        """Of these events, all of the CATEGORIES, take those that are copies between host and device."""
        copies = [copy for copy in copies if _NAME.match(copy.name)]
        if copies:
            names = [self._names.setdefault(copy.name, len(self._names)) for copy in copies]
            args = [(copy.args.device, copy.args.bytes, copy.args.stream) for copy in copies]
            self._rows.add(*spans(copies), names, *np.array(args, np.int64).T)

    def table(self, base_ns: int) -> pd.DataFrame:
        """The table `transfers`."""
        rows = self._rows.table()
        names = np.array([*self._names], dtype=object)
        said = [_said(name) for name in names]
        return frame(
            "transfers",
            {
                "start_ns": rows["start"] + base_ns,
                "end_ns": rows["end"] + base_ns,
                "device": "cuda:" + rows["device"].clip(lower=0).astype(str),
                "direction": [said[name][0] for name in rows["name"]],
                "bytes": rows["bytes"].astype("Int64").mask(rows["bytes"] == MISSING),
                "host_memory": [said[name][1] for name in rows["name"]],
                "stream": rows["stream"].astype("Int64").mask(rows["stream"] == MISSING),
                "name": names[rows["name"]],
            },
        )


def _said(name: str) -> tuple[str, str | None]:
    """(direction, kind of host memory, None where it is not told) of a copy."""
    way, source, target = _NAME.match(name).groups()  # type: ignore[union-attr]
    return ("h2d", _HOST_MEMORY.get(source)) if way == "HtoD" else ("d2h", _HOST_MEMORY.get(target))


def read(paths: Iterable[Path], wall_to_monotonic_ns: int) -> tuple[pd.DataFrame, list[str]]:
    """The table `transfers` of these files, and a line for each that could not be read, or not to its end."""
    tables = [frame("transfers")]
    trouble = []
    for path in paths:
        found = Transfers()
        try:
            with path.open("rb") as file:
                trace = ChromeTrace(file)
                for batch in trace.batches():
                    found.add([event for event in batch if event.cat in CATEGORIES and event.ts is not UNSET])
        except (OSError, ValueError) as error:
            trouble.append(f"the copies in {path.name} could not be read ({error})")
            continue
        tables.append(found.table(trace.base_ns + wall_to_monotonic_ns))
        if trace.trouble or trace.skipped:
            trouble.append(f"the copies in {path.name} could not all be read ({trace.trouble or 'some are damaged'})")
    return frame("transfers", pd.concat(tables)), trouble
