"""Device times of phases and steps, from the GPU activities of one rank and the calls that launched them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.gpu_activities.kinds import COMMUNICATION
from ebbtide.profiler.importers.kineto.intervals import interval_index


class DeviceTimes:
    """Times at which a device ran what the host launched in intervals.

    Args:
        work: `GpuActivities.work`.
    """

    def __init__(self, work: pd.DataFrame) -> None:
        launched = work["launched"].notna()
        self._work = work.loc[launched, ["start", "end", "device", "stream", "kind"]]
        self._launches = work.loc[launched, "launched"].astype("int64")

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
        interval = interval_index(self._launches, starts, ends)
        return self._work.assign(interval=interval)[interval >= 0]


def _on_main(work: pd.DataFrame) -> pd.Series[bool]:
    """Return which work is on the main stream, or of an interval that did not use the main stream."""
    stream = work.groupby(["device", "stream"])["interval"].transform("size")
    on_main = stream.eq(stream.max())
    return on_main | ~on_main.groupby(work["interval"]).transform("any")
