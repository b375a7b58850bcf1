"""Lines of the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

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

# So many rows at a time become Python objects.
_CHUNK = 20_000


def dumps(value: Any) -> str:
    """Compact JSON. Letters stay as they are: Perfetto does not read every escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def microseconds(ns: int) -> str:
    """Nanoseconds, not negative, as a decimal number of microseconds.

    Perfetto multiplies by 1000 and cuts off, so that 1.001 becomes 1000 ns and a slice may reach into its neighbour,
    and then it leaves one of them out. Where that would happen a tenth of a nanosecond is added.
    """
    whole, rest = divmod(ns, 1000)
    text = f"{whole}.{rest:03d}"
    # Its own parser adds the two parts; others find the nearest number.
    return text if int((whole + rest / 1000) * 1000) == int(ns / 1000 * 1000) == ns else f"{text}1"


class Process:
    """One process of the file. tids: numbers for its tracks, shared by all processes, since Perfetto names a track by
    its number alone. Times are ns after origin_ns."""

    def __init__(self, pid: int, tids: Iterator[int], origin_ns: int) -> None:
        self.pid = pid
        self._tids = tids
        self._origin_ns = origin_ns
        self._order = itertools.count()

    def named(self, name: str) -> Iterator[str]:
        yield self._metadata("process_name", name=name)
        yield self._metadata("process_sort_index", sort_index=self.pid)

    def slices(
        self, track: str, category: str, rows: pd.DataFrame, parents: Sequence[int | None] | None = None
    ) -> Iterator[str]:
        """A slice per row, on one track or, where slices overlap, as many as it takes.

        rows: name, start_ns, end_ns; every other column becomes an argument, null where it has no value. parents: see
        assign_lanes.
        """
        starts, ends = rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
        order, lanes = assign_lanes(starts, ends, parents)
        tids = [next(self._tids) for _ in range(int(lanes.max()) + 1 if len(lanes) else 0)]
        for number, tid in enumerate(tids):
            name = track if number == 0 else f"{track} ({number + 1})"
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=next(self._order))
        for first in range(0, len(order), _CHUNK):
            places = order[first : first + _CHUNK]
            part = rows.iloc[places].astype(object)
            part = part.where(part.notna(), None)
            for lane, row in zip(lanes[places].tolist(), part.to_dict("records"), strict=True):
                name, start, end = row.pop("name"), row.pop("start_ns"), row.pop("end_ns")
                yield (
                    f'{{"ph":"X","pid":{self.pid},"tid":{tids[lane]},"ts":{self._ts(start)},'
                    f'"dur":{microseconds(end - start)},"cat":"{category}","name":{dumps(name)},"args":{dumps(row)}}}'
                )

    def counter(self, name: str, series: str, times: Sequence[int], values: Sequence[float]) -> Iterator[str]:
        """A step function: each value holds from its time to the next; times in order, values finite."""
        head = f'{{"ph":"C","pid":{self.pid},"name":{dumps(name)},"ts":'
        key = dumps(series)
        for t, value in zip(times, values, strict=True):
            yield f'{head}{self._ts(t)},"args":{{{key}:{value!r}}}}}'

    def _ts(self, ns: int) -> str:
        return microseconds(ns - self._origin_ns)

    def _metadata(self, what: str, tid: int | None = None, **args: Any) -> str:
        thread = {} if tid is None else {"tid": tid}
        return dumps({"ph": "M", "pid": self.pid, **thread, "name": what, "args": args})
