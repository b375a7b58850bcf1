"""Collects the calls by which the host launches work and waits for the device as
columns of the table `calls`."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.chrome_trace.events import (
    MISSING,
    Event,
    IntArray,
    IntTable,
    spans,
)

# Calls beside launches that the trace keeps: they wait for the device, or take the host
# long.
KEPT_CALLS = re.compile(
    "Synchronize|StreamWaitEvent|Malloc|Free|HostAlloc|HostRegister"
)
_STREAM_SYNC = "Stream Sync"
# Larger numbers stand for no stream.
_MAX_STREAM = (1 << 32) - 1


class HostCalls:
    """Collects calls, and what each wait is for."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._calls = IntTable("correlation", "start", "end", "thread", "name")
        self._waits = IntTable("correlation", "stream", "awaited_stream", "record")

    def add(self, events: list[Event]) -> None:
        """Add events of CALL_CATEGORIES."""
        rows = [
            (
                event.args.correlation,
                thread_number(event.tid),
                self._names.setdefault(event.name, len(self._names)),
            )
            for event in events
        ]
        correlations, threads, names = np.array(rows, np.int64).T
        self._calls.add(correlations, *spans(events), threads, names)

    def add_waits(self, events: list[Event]) -> None:
        """Add events of SYNC_CATEGORIES."""
        rows = []
        for event in events:
            args = event.args
            streams = (
                (MISSING, args.stream)
                if event.name == _STREAM_SYNC
                else (args.stream, args.awaited_stream)
            )
            rows.append(
                (
                    args.correlation,
                    *(s if 0 <= s < _MAX_STREAM else MISSING for s in streams),
                    args.record,
                )
            )
        self._waits.add(*np.array(rows, np.int64).T)

    def table(self) -> pd.DataFrame:
        """Return correlation, start, end (ns), thread, and name as a number."""
        return self._calls.table()

    def columns(self, launching: npt.ArrayLike, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `calls`. `launching`: correlations of work.
        `base_ns` is added to times."""
        calls, waits = self._calls.table(), self._waits.table()
        rows = kept_calls(calls, [*self._names], launching)
        values, stated = matching(
            waits[["correlation", "stream", "awaited_stream", "record"]],
            rows["correlation"],
        )
        stream, awaited_stream, record = np.where(stated, values, MISSING)
        (recorded_ns,), was_recorded = matching(calls[["correlation", "start"]], record)
        columns = call_columns(rows, [*self._names], base_ns)
        columns |= {
            "stream": _nullable(stream),
            "awaited_stream": _nullable(awaited_stream),
        }
        return columns | {
            "awaited_ns": pd.arrays.IntegerArray(recorded_ns + base_ns, ~was_recorded)
        }


def kept_calls(
    calls: pd.DataFrame, names: list[str], launching: npt.ArrayLike
) -> pd.DataFrame:
    """Return the rows of calls that the trace keeps. `calls` has correlation and name
    (a position in `names`)."""
    by_name = np.array([KEPT_CALLS.search(name) is not None for name in names], bool)
    launches = (calls["correlation"] > 0) & calls["correlation"].isin(launching)
    return (
        calls[launches.to_numpy(bool) | by_name[calls["name"]]] if len(calls) else calls
    )


def call_columns(rows: pd.DataFrame, names: list[str], base_ns: int) -> dict[str, Any]:
    """Return the columns of the table `calls` that every source has. `rows`: start, end
    (ns), thread, name."""
    used, codes = np.unique(rows["name"], return_inverse=True)
    return {
        "start_ns": (rows["start"] + base_ns).to_numpy(),
        "end_ns": (rows["end"] + base_ns).to_numpy(),
        "name": pd.Categorical.from_codes(codes, [names[number] for number in used]),
        "thread": _nullable(rows["thread"].to_numpy()),
    }


def _nullable(values: IntArray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(values.copy(), values == MISSING)


def thread_number(tid: Any) -> int:
    """Return the number of a thread; MISSING where an event states none."""
    return tid if type(tid) is int and 0 <= tid < 1 << 62 else MISSING


def with_launches(work: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return work with the time and thread of the call that launched it.

    `launched` is the start of the first call with the work's correlation, missing where
    there is none; the thread is MISSING where it is not known.
    """
    (launched, threads), recorded = matching(
        calls[["correlation", "start", "thread"]], work["correlation"]
    )
    launches = pd.arrays.IntegerArray(launched, ~recorded)
    return work.assign(launched=launches, thread=np.where(recorded, threads, MISSING))


def matching(
    calls: pd.DataFrame, correlations: npt.ArrayLike
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the first call with each correlation, and whether there is one.

    The values of calls have the shape (values, correlations). `calls`: columns
    correlation and values. `correlations`: only positive ones state a call.
    """
    wanted = np.asarray(correlations, np.int64)
    if calls.empty:
        return np.zeros((calls.shape[1] - 1, len(wanted)), np.int64), np.zeros(
            len(wanted), bool
        )
    numbers, *values = calls.to_numpy(np.int64).T
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    position = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.array(values)[:, order[position]], (numbers[position] == wanted) & (
        wanted > 0
    )
