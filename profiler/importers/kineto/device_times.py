"""What a rank's GPUs did, and when they ran the work of each phase."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.events import Event, spans
from ebbtide.profiler.chrome_trace.int_table import Rows
from ebbtide.profiler.importers.kineto.intervals import within

ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})


class Device:
    """Collects a trace's GPU activities, and the calls that launched them."""

    def __init__(self) -> None:
        self._activities = Rows("start", "end", "correlation", "device", "stream")
        self._launches = Rows("launched", "correlation")

    def add_activities(self, events: list[Event]) -> None:
        args = [(event.args.correlation, event.args.device, event.args.stream) for event in events]
        self._activities.add(*spans(events), *np.array(args, np.int64).T)

    def add_launches(self, events: list[Event]) -> None:
        self._launches.add(spans(events)[0], [event.args.correlation for event in events])

    def busiest(self) -> list[int]:
        """The devices that ran anything, the one that was busy longest first."""
        ran = self._activities.table()
        busy = (ran["end"] - ran["start"]).groupby(ran["device"].clip(lower=0)).sum()
        return [int(device) for device in busy.sort_values(ascending=False, kind="stable").index]

    def times(self, phases: pd.DataFrame) -> pd.DataFrame:
        """gpu_start_ns and gpu_end_ns of each of `phases` (start_ns, end_ns: in order, apart): the first start and the
        last end of what was launched from within, missing where nothing was.

        Counted is the stream on which most was launched, where the phase used it: it waits for all that the next phase
        needs, while copies on other streams run on into other phases.
        """
        work = self._activities.table().merge(self._launches.table().drop_duplicates("correlation"), on="correlation")
        work["phase"] = within(work["launched"], phases["start_ns"], phases["end_ns"])
        work = work[(work["phase"] >= 0) & (work["correlation"] > 0)]
        stream = work.groupby(["device", "stream"])["phase"].transform("size")
        main = stream.eq(stream.max())
        work = work[main | ~main.groupby(work["phase"]).transform("any")]
        ran = work.groupby("phase").agg(gpu_start_ns=("start", "min"), gpu_end_ns=("end", "max"))
        # Where two streams are counted after all, phases must not overlap.
        reached = ran["gpu_end_ns"].cummax()
        ran["gpu_start_ns"] = np.maximum(ran["gpu_start_ns"], reached.shift(fill_value=np.iinfo(np.int64).min))
        ran["gpu_end_ns"] = reached
        return ran.astype("Int64").reindex(range(len(phases)))
