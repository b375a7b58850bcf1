"""Device times of phases and steps, from the GPU activities of one rank and the calls that launched them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable
from ebbtide.profiler.importers.kineto.intervals import interval_index
from ebbtide.profiler.importers.kineto.kernels import COMMUNICATION, kernel_table, kind_of

ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})


class DeviceActivity:
    """Collects the GPU activities of a trace, and the calls that launched them. Add all events before reading."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._activities = IntTable("start", "end", "correlation", "device", "stream", "kind", "name")
        self._launches = IntTable("launched", "correlation")

    def add_activities(self, events: list[Event]) -> None:
        """Add events of the categories in ACTIVITIES."""
        args = [(event.args.correlation, event.args.device, event.args.stream) for event in events]
        names = [self._names.setdefault(event.name, len(self._names)) for event in events]
        self._activities.add(*spans(events), *np.array(args, np.int64).T, [*map(kind_of, events)], names)

    def add_launches(self, events: list[Event]) -> None:
        """Add calls of the driver: events of `transfers.CALL_CATEGORIES`."""
        self._launches.add(spans(events)[0], [event.args.correlation for event in events])

    @cached_property
    def _work(self) -> pd.DataFrame:
        """All activities, with the time `launched`; missing where the call was not recorded."""
        launches = self._launches.table().drop_duplicates("correlation").set_index("correlation")["launched"]
        activities = self._activities.table()
        launched = launches[launches.index > 0].astype("Int64").reindex(activities["correlation"])
        return activities.assign(launched=launched.array)

    def busiest(self) -> list[int]:
        """Return the numbers of the devices that ran anything, by busy time in descending order."""
        activities = self._work
        busy = (activities["end"] - activities["start"]).groupby(activities["device"].clip(lower=0)).sum()
        return [int(device) for device in busy.sort_values(ascending=False, kind="stable").index]

    def kernels(self, base_ns: int) -> pd.DataFrame:
        """Return the table `kernels`. base_ns: added to the times of the events."""
        return kernel_table(self._work, [*self._names], base_ns)

    def times(self, phases: pd.DataFrame) -> pd.DataFrame:
        """Compute when the device ran each phase: from the first start to the last end of the work launched in it.

        Only work on the main stream (the one with the most launches) counts, if the phase used it. The main stream
        waits for everything that the next phase needs, while copies on other streams extend into other phases. Before
        the next phase begins, the device runs the collectives that the phase launched: the phase includes them.

        Args:
            phases: Columns start_ns and end_ns, in order and without overlap.

        Returns:
            Columns gpu_start_ns and gpu_end_ns for each phase; missing for a phase that launched nothing.
        """
        launched = self._launched_in(phases["start_ns"], phases["end_ns"])
        work = launched[_on_main(launched)]
        times = work.groupby("interval").agg(gpu_start_ns=("start", "min"), gpu_end_ns=("end", "max"))
        # Phases must not overlap, also if two streams were counted.
        latest_end = times["gpu_end_ns"].cummax()
        times["gpu_start_ns"] = np.maximum(times["gpu_start_ns"], latest_end.shift(fill_value=np.iinfo(np.int64).min))
        collectives = launched[launched["kind"] == COMMUNICATION].groupby("interval")["end"].max()
        next_start = times["gpu_start_ns"].shift(-1, fill_value=np.iinfo(np.int64).max)
        finished = np.minimum(collectives.reindex(times.index, fill_value=np.iinfo(np.int64).min), next_start)
        times["gpu_end_ns"] = np.maximum(latest_end, finished)
        return times.astype("Int64").reindex(range(len(phases)))

    def ends(self, steps: pd.DataFrame) -> pd.Series[int]:
        """Compute when the device finished each step: the last end of the work launched in it on the main stream.

        The last step ends with all of its work, on any stream. Missing for a step that launched nothing.

        Args:
            steps: Columns start and end, in order and without overlap.
        """
        launched = self._launched_in(steps["start"], steps["end"])
        counted = _on_main(launched) | (launched["interval"] == len(steps) - 1)
        return launched[counted].groupby("interval")["end"].max().cummax().astype("Int64").reindex(range(len(steps)))

    def _launched_in(self, starts: pd.Series[int], ends: pd.Series[int]) -> pd.DataFrame:
        """Return the work that was launched in intervals, with the number of its `interval`."""
        work = self._work[self._work["launched"].notna()]
        work = work.assign(interval=interval_index(work["launched"].astype("int64"), starts, ends))
        return work[work["interval"] >= 0]


def _on_main(work: pd.DataFrame) -> pd.Series[bool]:
    """Return which work is on the main stream, or of an interval that did not use the main stream."""
    stream = work.groupby(["device", "stream"])["interval"].transform("size")
    on_main = stream.eq(stream.max())
    return on_main | ~on_main.groupby(work["interval"]).transform("any")
