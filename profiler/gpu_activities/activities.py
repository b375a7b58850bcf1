"""Collects the GPU activities of a Chrome trace and the calls that launched them, as columns of the trace's tables."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntArray, IntTable
from ebbtide.profiler.gpu_activities.kinds import (
    ACTIVITY_CATEGORIES,
    CALL_CATEGORIES,
    COMMUNICATION,
    TRANSFER,
    kind_of,
)
from ebbtide.profiler.gpu_activities.process_groups import process_group
from ebbtide.profiler.gpu_activities.tables import kernel_columns, transfer_columns

# No copy has so many bytes, and no trace has so many copies that their sum overflows.
_MAX_BYTES = 1 << 44


class GpuActivities:
    """Collects the GPU activities of one trace, and the calls that launched them. Add all events before reading.

    Attributes:
        duplicates: Number of activities that were in the trace twice, known once `work` was read.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._groups: dict[str | None, int] = {None: MISSING}
        columns = ("start", "end", "correlation", "device", "stream", "kind", "name", "bytes", "group")
        self._activities = IntTable(*columns)
        self._launches = IntTable("correlation", "launched")
        self._sizes = IntTable("correlation", "bytes")
        self.duplicates = 0

    def add(self, events: list[Event]) -> None:
        """Add the events of ACTIVITY_CATEGORIES and CALL_CATEGORIES among events that have times."""
        self.add_activities([event for event in events if event.cat in ACTIVITY_CATEGORIES])
        self.add_calls([event for event in events if event.cat in CALL_CATEGORIES])

    def add_activities(self, events: list[Event]) -> None:
        """Add events of ACTIVITY_CATEGORIES."""
        if not events:
            return
        names = self._names
        rows = []
        for event in events:
            args, kind = event.args, kind_of(event.cat, event.name)
            name = names.setdefault(event.name, len(names))
            group = MISSING
            if kind == COMMUNICATION:
                group = self._groups.setdefault(process_group(args), len(self._groups) - 1)
            rows.append((args.correlation, args.device, args.stream, kind, name, args.bytes, group))
        self._activities.add(*spans(events), *np.array(rows, np.int64).T)

    def add_calls(self, events: list[Event]) -> None:
        """Add events of CALL_CATEGORIES: launches, and sizes of copies, which some ROCm versions state only there."""
        if not events:
            return
        self._launches.add([event.args.correlation for event in events], spans(events)[0])
        sizes = [(event.args.correlation, event.args.bytes) for event in events if event.args.bytes != MISSING]
        if sizes:
            self._sizes.add(*np.array(sizes, np.int64).T)

    @cached_property
    def work(self) -> pd.DataFrame:
        """All activities, each once.

        Columns start, end (ns), correlation, device, stream, kind (a position in KINDS, or TRANSFER), name and group
        (numbers), bytes, and `launched`: the start of the call, missing where it was not recorded.
        """
        work = self._activities.table()
        # One stream runs one activity at a time: the same one at the same time is the same event.
        repeated = work.duplicated()
        self.duplicates = int(repeated.sum())
        if self.duplicates:
            work = work[~repeated].reset_index(drop=True)
        launched, recorded = _matching(self._launches.table(), work["correlation"])
        return work.assign(launched=pd.arrays.IntegerArray(launched, ~recorded))

    def busiest(self) -> list[int]:
        """Return the numbers of the devices that ran anything, by busy time in descending order."""
        busy = (self.work["end"] - self.work["start"]).groupby(self.work["device"].clip(lower=0)).sum()
        return [int(device) for device in busy.sort_values(ascending=False, kind="stable").index]

    def transfers(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `transfers`. base_ns: added to the times of the events."""
        copies = self.work[self.work["kind"] == TRANSFER]
        stated, recorded = _matching(self._sizes.table(), copies["correlation"])
        sizes = copies["bytes"].mask((copies["bytes"] == MISSING) & recorded, stated)
        copies = copies.assign(bytes=sizes.where(sizes.between(0, _MAX_BYTES), MISSING))
        return transfer_columns(copies, [*self._names], base_ns)

    def kernels(self, base_ns: int) -> dict[str, Any]:
        """Return the columns of the table `kernels`. base_ns: added to the times of the events."""
        groups = [group for group in self._groups if group is not None]
        codes = self.work.loc[self.work["kind"] != TRANSFER, "group"]
        columns = kernel_columns(self.work, [*self._names], base_ns)
        return {**columns, "group": pd.Categorical.from_codes(codes, groups)}


def _matching(calls: pd.DataFrame, correlations: pd.Series[int]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the value of the first call with each correlation, and whether there is one.

    Args:
        calls: The correlation in the first column, the value in the second.
        correlations: Correlations, of which only positive ones state a call.
    """
    wanted = correlations.to_numpy(np.int64)
    if calls.empty:
        return np.zeros_like(wanted), np.zeros(len(wanted), bool)
    numbers, values = calls.to_numpy(np.int64).T
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    position = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return values[order][position], (numbers[position] == wanted) & (wanted > 0)
