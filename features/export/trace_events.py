"""Writes events of the Trace Event Format for ui.perfetto.dev and chrome://tracing
(Duca and Sinclair, Google, 2016)."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.step_functions import Ints


def assign_lanes(
    starts: Ints, ends: Ints, parents: Sequence[int | None] | None = None
) -> tuple[Ints, Ints]:
    """Return (drawing order, lane of each interval). In that order times rise, and a
    parent comes before what is nested in it. An interval shares the lane of its parent
    (an index, or None) if it is within it and overlaps no sibling there. Else it gets a
    lane that is free for all of its time. Intervals without parents need the fewest
    lanes possible."""
    # Intervals without length go first: they have ended when the intervals that begin
    # with them begin.
    order = np.lexsort((-ends, ends > starts, starts))
    lanes = np.zeros(len(starts), np.int64)
    # per lane, the open intervals, each within the one before
    nests: list[list[int]] = []
    busy_lanes: list[tuple[int, int]] = []  # (end, lane)
    free_lanes: list[int] = []
    for index in order.tolist():
        start, end = int(starts[index]), int(ends[index])
        parent = parents[index] if parents is not None else None
        if (
            parent is not None
            and 0 <= parent < len(lanes)
            and nests
            and end <= ends[parent]
        ):
            nest = nests[lanes[parent]]
            while nest and ends[nest[-1]] <= start:
                nest.pop()
            if nest and nest[-1] == parent:
                nest.append(index)
                lanes[index] = lanes[parent]
                continue
        while busy_lanes and busy_lanes[0][0] <= start:
            heapq.heappush(free_lanes, heapq.heappop(busy_lanes)[1])
        if not free_lanes:
            free_lanes.append(len(nests))
            nests.append([])
        lane = heapq.heappop(free_lanes)
        nests[lane] = [index]
        heapq.heappush(busy_lanes, (end, lane))
        lanes[index] = lane
    return order, lanes


def any_overlap(starts: Ints, ends: Ints) -> bool:
    """Return whether any two of the intervals share time."""
    order = np.lexsort((ends, starts))
    return bool((starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any())


# Rows that are converted to Python objects at a time.
_CHUNK = 20_000
# Category and name of flows, as torch's profiler has them: from the CPU to the
# accelerator.
_FLOW = "ac2g"


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Return compact JSON. Letters are not escaped: Perfetto does not read every
    escape."""
    return _ENCODER.encode(value)


def microseconds(ns: Ints) -> list[str]:
    """Return nanoseconds, not negative, as decimal numbers of microseconds. Perfetto
    multiplies by 1000 and truncates, so that 1.001 becomes 1000 ns, and drops slices
    that then overlap: such numbers get a tenth of a nanosecond more."""
    full, remainder = np.divmod(ns, 1000)
    # Perfetto's own parser adds the two parts; others find the nearest number.
    added = ((full + remainder / 1000) * 1000).astype(np.int64)
    nearest = (ns / 1000 * 1000).astype(np.int64)
    ends = np.where((added == ns) & (nearest == ns), "", "1")
    return [
        f"{us}.{part:03d}{end}"
        for us, part, end in zip(full.tolist(), remainder.tolist(), ends, strict=True)
    ]


def arguments(rows: pd.DataFrame) -> list[str]:
    """Return the columns of each row as a JSON object, null where one has no value."""
    texts = [
        [f"{dumps(str(name))}:{value}" for value in _json_values(rows[name])]
        for name in rows.columns
    ]
    if not texts:
        return ["{}"] * len(rows)
    return [f"{{{','.join(values)}}}" for values in zip(*texts, strict=True)]


def _json_values(column: pd.Series[Any]) -> Iterator[str]:
    """Yield the values of a column as JSON; each different text is converted once."""
    texts: dict[Any, str] = {}
    for value, is_known in zip(column.tolist(), column.notna().tolist(), strict=True):
        if not is_known:
            yield "null"
        elif type(value) is int:
            yield str(value)
        elif isinstance(value, str):
            yield texts.get(value) or texts.setdefault(value, dumps(value))
        else:
            yield dumps(value)


def _contents(tables: Mapping[str, pd.DataFrame], indices: Ints) -> list[str]:
    """Return category, name and arguments of some rows of all tables as members of a
    JSON object."""
    contents = [""] * len(indices)
    begin = 0
    for category, rows in tables.items():
        positions = np.flatnonzero((indices >= begin) & (indices < begin + len(rows)))
        part = rows.iloc[indices[positions] - begin]
        texts = arguments(part.drop(columns=["name", "start_ns", "end_ns"]))
        for position, name, args in zip(
            positions.tolist(), _json_values(part["name"]), texts, strict=True
        ):
            contents[position] = f'"cat":"{category}","name":{name},"args":{args}'
        begin += len(rows)
    return contents


class Process:
    """Writes the events of one process of the file; `pid` is its number."""

    def __init__(self, pid: int, tids: Iterator[int], origin_ns: int) -> None:
        """Start a process. All share `tids`: Perfetto identifies a track by its number
        alone."""
        self.pid = pid
        self._tids = tids
        self._origin_ns = origin_ns
        self._order = itertools.count()

    def name_events(self, name: str) -> Iterator[str]:
        """Yield the events that name the process."""
        yield self._metadata("process_name", name=name)
        yield self._metadata("process_sort_index", sort_index=self.pid)

    def slices(
        self,
        track: str,
        tables: Mapping[str, pd.DataFrame],
        parents: Sequence[int | None] | None = None,
        flow: Literal["start", "end"] | None = None,
    ) -> Iterator[str]:
        """Yield a slice per row, on one track, or on several if slices overlap.
        `tables`, by category, have columns name, start_ns, end_ns; all others become
        arguments. `parents`: see `assign_lanes`. `flow`: start or end a flow at each
        row that has a value in the column `correlation`; both ends have the same value,
        which no other flow of the file has."""
        starts, ends = (
            np.concatenate(
                [
                    np.empty(0, np.int64),
                    *(rows[side].to_numpy(np.int64) for rows in tables.values()),
                ]
            )
            for side in ("start_ns", "end_ns")
        )
        if parents is None and not any_overlap(starts, ends):
            order, lanes = np.lexsort((ends, starts)), np.zeros(len(starts), np.int64)
        else:
            order, lanes = assign_lanes(starts, ends, parents)
        tids = [
            next(self._tids) for _ in range(int(lanes.max()) + 1 if len(lanes) else 0)
        ]
        for number, tid in enumerate(tids):
            name = track if number == 0 else f"{track} ({number + 1})"
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=next(self._order))
        for first in range(0, len(order), _CHUNK):
            indices = order[first : first + _CHUNK]
            times = (
                self._ts(starts[indices]),
                microseconds(ends[indices] - starts[indices]),
            )
            contents = _contents(tables, indices)
            for lane, ts, dur, content in zip(
                lanes[indices].tolist(), *times, contents, strict=True
            ):
                yield f'{{"ph":"X","pid":{self.pid},"tid":{tids[lane]},"ts":{ts},"dur":{dur},{content}}}'
            if flow is not None:
                numbers = pd.concat(
                    [rows["correlation"] for rows in tables.values()]
                ).iloc[indices]
                place = '"ph":"s"' if flow == "start" else '"ph":"f","bp":"e"'
                for lane, ts, number, is_known in zip(
                    lanes[indices].tolist(),
                    times[0],
                    numbers.tolist(),
                    numbers.notna().tolist(),
                    strict=True,
                ):
                    if is_known:
                        yield (
                            f'{{{place},"id":{number},"pid":{self.pid},"tid":{tids[lane]},"ts":{ts},'
                            f'"cat":"{_FLOW}","name":"{_FLOW}"}}'
                        )

    def counter(
        self, name: str, series: str, times: Sequence[int], values: Sequence[float]
    ) -> Iterator[str]:
        """Yield a step function: each value holds from its time to the next.

        Times are in order, values finite.
        """
        head = f'{{"ph":"C","pid":{self.pid},"name":{dumps(name)},"ts":'
        key = dumps(series)
        for ts, value in zip(self._ts(np.array(times, np.int64)), values, strict=True):
            yield f'{head}{ts},"args":{{{key}:{value!r}}}}}'

    def _ts(self, ns: Ints) -> list[str]:
        return microseconds(ns - self._origin_ns)

    def _metadata(self, kind: str, tid: int | None = None, **args: Any) -> str:
        thread = {} if tid is None else {"tid": tid}
        return dumps({"ph": "M", "pid": self.pid, **thread, "name": kind, "args": args})
