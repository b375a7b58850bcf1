"""Device times of phases, from the GPU activities of one rank and the calls that launched them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntTable
from ebbtide.profiler.importers.kineto.intervals import interval_index

ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})


class DeviceActivity:
    """Collects the GPU activities of a trace, and the calls that launched them."""

    def __init__(self) -> None:
        self._activities = IntTable("start", "end", "correlation", "device", "stream")
        self._launches = IntTable("launched", "correlation")

    def add_activities(self, events: list[Event]) -> None:
        """Add events of the categories in ACTIVITIES."""
        args = [(event.args.correlation, event.args.device, event.args.stream) for event in events]
        self._activities.add(*spans(events), *np.array(args, np.int64).T)

    def add_launches(self, events: list[Event]) -> None:
        """Add events of the categories in LAUNCHES."""
        self._launches.add(spans(events)[0], [event.args.correlation for event in events])

    def busiest(self) -> list[int]:
        """Return the numbers of the devices that ran anything, by busy time in descending order."""
        activities = self._activities.table()
        busy = (activities["end"] - activities["start"]).groupby(activities["device"].clip(lower=0)).sum()
        return [int(device) for device in busy.sort_values(ascending=False, kind="stable").index]

    def times(self, phases: pd.DataFrame) -> pd.DataFrame:
        """Compute when the device ran each phase: from the first start to the last end of the work launched in it.

        Only work on the main stream (the one with the most launches) counts, if the phase used it. The main stream
        waits for everything that the next phase needs, while copies on other streams extend into other phases.

        Args:
            phases: Columns start_ns and end_ns, in order and without overlap.

        Returns:
            Columns gpu_start_ns and gpu_end_ns for each phase; missing for a phase that launched nothing.
        """
        work = self._activities.table().merge(self._launches.table().drop_duplicates("correlation"), on="correlation")
        work["phase"] = interval_index(work["launched"], phases["start_ns"], phases["end_ns"])
        work = work[(work["phase"] >= 0) & (work["correlation"] > 0)]
        stream = work.groupby(["device", "stream"])["phase"].transform("size")
        on_main = stream.eq(stream.max())
        work = work[on_main | ~on_main.groupby(work["phase"]).transform("any")]
        times = work.groupby("phase").agg(gpu_start_ns=("start", "min"), gpu_end_ns=("end", "max"))
        # Phases must not overlap, also if two streams were counted.
        latest_end = times["gpu_end_ns"].cummax()
        times["gpu_start_ns"] = np.maximum(times["gpu_start_ns"], latest_end.shift(fill_value=np.iinfo(np.int64).min))
        times["gpu_end_ns"] = latest_end
        return times.astype("Int64").reindex(range(len(phases)))
