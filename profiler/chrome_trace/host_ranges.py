"""Collects the operators and named ranges of the host, and finds the range that
launched work."""

import re

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
from ebbtide.profiler.chrome_trace.gpu_activities import TRANSFER, labels
from ebbtide.profiler.chrome_trace.host_calls import thread_number

# torch.autograd.profiler.emit_nvtx adds these to the name of an operator.
_NVTX_DETAILS = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
# Ranges of whole iterations are no operators: each has a name of its own.
_NUMBERED_ITERATION = re.compile(
    r"\w*(?:step|iteration|iter|batch)[\s#:=_-]*\d+", re.IGNORECASE
)


class HostRanges:
    """Collects ranges with their names and threads.

    `names`: the texts that the column `name` of rows refers to by position."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], int] = {}
        self._rows = IntTable("start", "end", "name", "thread")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._names]

    def add(self, events: list[Event]) -> None:
        """Add operators and annotations."""
        names = [
            self._names.setdefault((event.name, event.cat), len(self._names))
            for event in events
        ]
        self._rows.add(
            *spans(events), names, [thread_number(event.tid) for event in events]
        )

    def rows(self, category: str | None = None) -> pd.DataFrame:
        """Return start, end (ns), name and thread of ranges of a category, or of all if
        it is None."""
        rows = self._rows.table()
        if category is None or rows.empty:
            return rows
        return rows[np.array([own == category for _, own in self._names])[rows["name"]]]


def operators(
    work: pd.DataFrame, ranges: pd.DataFrame, names: list[str]
) -> pd.Categorical:
    """Return the operator of each kernel, the innermost range in which its thread
    launched it; missing where there is none.

    `work`: as of `with_launches`, without copies. `ranges`: start, end, thread, name (a
    position in `names`)."""
    kernels = work[work["kind"] != TRANSFER]
    launched = kernels["launched"].fillna(MISSING).to_numpy(np.int64)
    rows = innermost(ranges, launched, kernels["thread"].to_numpy(np.int64))
    used = np.append(ranges["name"].to_numpy(np.int64), MISSING)[rows]
    return labels(
        pd.Series(used),
        lambda number: None if number == MISSING else _operator(names[number]),
    )


def _operator(name: str) -> str | None:
    return None if _NUMBERED_ITERATION.fullmatch(name) else _NVTX_DETAILS.sub("", name)


def self_times(ranges: pd.DataFrame) -> IntArray:
    """Return the time of each range, ns, without the ranges of its thread inside it.

    `ranges`: start, end and thread; the ranges of a thread are nested or disjoint."""
    starts, ends, threads = (
        ranges[column].to_numpy(np.int64) for column in ("start", "end", "thread")
    )
    own = ends - starts
    open_rows: list[int] = []
    for row in np.lexsort((-ends, starts, threads)).tolist():
        while open_rows and (
            threads[open_rows[-1]] != threads[row] or ends[open_rows[-1]] <= starts[row]
        ):
            open_rows.pop()
        if open_rows:
            own[open_rows[-1]] -= ends[row] - starts[row]
        open_rows.append(row)
    shortest: IntArray = np.maximum(own, 0)
    return shortest


def innermost(ranges: pd.DataFrame, times: IntArray, threads: IntArray) -> IntArray:
    """Return the row of the innermost range of a thread that contains each time;
    MISSING where no range does, or the thread is.

    `ranges`: start, end and thread; the ranges of a thread are nested or disjoint."""
    rows = np.full(len(times), MISSING)
    own_threads = ranges["thread"].to_numpy(np.int64)
    starts, ends = (ranges[side].to_numpy(np.int64) for side in ("start", "end"))
    for thread in np.unique(threads[threads != MISSING]).tolist():
        of_thread = np.flatnonzero((own_threads == thread) & (ends > starts))
        asked = np.flatnonzero(threads == thread)
        if len(of_thread):
            position = _innermost(starts[of_thread], ends[of_thread], times[asked])
            rows[asked] = np.append(of_thread, MISSING)[position]
    return rows


def _innermost(
    starts: IntArray, ends: IntArray, times: IntArray
) -> npt.NDArray[np.int64]:
    """Return the position of the innermost range at each time; -1 where there is none.

    No range is empty.
    """
    order = np.lexsort((-ends, starts))
    starts, closed, count = starts[order], np.sort(ends), len(starts)
    depths = np.arange(1, count + 1) - np.searchsorted(closed, starts, side="right")
    # Ranges by depth, the ranges of one depth in order: a number for each.
    keys = np.sort(depths * count + np.arange(count))
    begun = np.searchsorted(starts, times, side="right")
    depth = begun - np.searchsorted(closed, times, side="right")
    last = keys[np.searchsorted(keys, depth * count + begun) - 1] % count
    inside = (starts[last] <= times) & (times < ends[order][last])
    return np.where(inside, order[last], -1)
