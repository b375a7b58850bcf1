"""Writes events of the Trace Event Format, which ui.perfetto.dev and chrome://tracing read.

The format: Duca and Sinclair, "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.lanes import assign_lanes

# Rows that are converted to Python objects at a time.
_CHUNK = 20_000


def dumps(value: Any) -> str:
    """Return compact JSON. Letters are not escaped: Perfetto does not read every escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def microseconds(ns: int) -> str:
    """Return nanoseconds, not negative, as a decimal number of microseconds.

    Perfetto multiplies by 1000 and truncates, so that 1.001 becomes 1000 ns: a slice may then overlap its neighbour,
    and Perfetto drops one of them. Numbers to which this would happen get a tenth of a nanosecond more.
    """
    full, remainder = divmod(ns, 1000)
    text = f"{full}.{remainder:03d}"
    # Perfetto's own parser adds the two parts; others find the nearest number.
    return text if int((full + remainder / 1000) * 1000) == int(ns / 1000 * 1000) == ns else f"{text}1"


class Process:
    """Writes the events of one process of the file.

    Attributes:
        pid: Number of the process.
    """

    def __init__(self, pid: int, tids: Iterator[int], origin_ns: int) -> None:
        """Start a process.

        Args:
            pid: Its number.
            tids: Numbers for its tracks, shared by all processes: Perfetto identifies a track by its number alone.
            origin_ns: Time of the trace that is 0 in the file.
        """
        self.pid = pid
        self._tids = tids
        self._origin_ns = origin_ns
        self._order = itertools.count()

    def name_events(self, name: str) -> Iterator[str]:
        """Yield the events that name the process."""
        yield self._metadata("process_name", name=name)
        yield self._metadata("process_sort_index", sort_index=self.pid)

    def slices(
        self, track: str, category: str, rows: pd.DataFrame, parents: Sequence[int | None] | None = None
    ) -> Iterator[str]:
        """Yield a slice per row, on one track, or on several if slices overlap.

        Args:
            track: Name of the track.
            category: Category of the slices.
            rows: Columns name, start_ns, end_ns; every other column becomes an argument, null where it has no value.
            parents: For each row the index of its parent, or None; see `assign_lanes`.
        """
        starts, ends = rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
        order, lanes = assign_lanes(starts, ends, parents)
        tids = [next(self._tids) for _ in range(int(lanes.max()) + 1 if len(lanes) else 0)]
        for number, tid in enumerate(tids):
            name = track if number == 0 else f"{track} ({number + 1})"
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=next(self._order))
        for first in range(0, len(order), _CHUNK):
            indices = order[first : first + _CHUNK]
            part = rows.iloc[indices].astype(object)
            part = part.where(part.notna(), None)
            for lane, row in zip(lanes[indices].tolist(), part.to_dict("records"), strict=True):
                name, start, end = row.pop("name"), row.pop("start_ns"), row.pop("end_ns")
                yield (
                    f'{{"ph":"X","pid":{self.pid},"tid":{tids[lane]},"ts":{self._ts(start)},'
                    f'"dur":{microseconds(end - start)},"cat":"{category}","name":{dumps(name)},"args":{dumps(row)}}}'
                )

    def counter(self, name: str, series: str, times: Sequence[int], values: Sequence[float]) -> Iterator[str]:
        """Yield a step function: each value holds from its time to the next; times in order, values finite."""
        head = f'{{"ph":"C","pid":{self.pid},"name":{dumps(name)},"ts":'
        key = dumps(series)
        for t, value in zip(times, values, strict=True):
            yield f'{head}{self._ts(t)},"args":{{{key}:{value!r}}}}}'

    def _ts(self, ns: int) -> str:
        return microseconds(ns - self._origin_ns)

    def _metadata(self, kind: str, tid: int | None = None, **args: Any) -> str:
        thread = {} if tid is None else {"tid": tid}
        return dumps({"ph": "M", "pid": self.pid, **thread, "name": kind, "args": args})
