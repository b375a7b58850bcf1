"""Causes of the time in which a GPU does not compute."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.activity.busy_time import busy_time, main_kernels, main_transfers
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.timeseries.intervals import Union, difference, merged
from ebbtide.profiler.trace import Trace

# In the order of output, with their texts. Together with `compute` they are the whole time.
CAUSE_TEXTS = {
    "communication": "communication runs alone",
    "copy": "copies run, no communication",
    "memset": "memory is being set",
    "late_launch": "idle: next work launched up to 0.1 ms late",
    "host_busy": "idle: host launched nothing for over 0.1 ms",
    "queue": "idle: next work launched, but not begun",
    "unknown": "idle: launch not recorded",
}
CAUSES = tuple(CAUSE_TEXTS)
# A host that does nothing but launch needs less than this for the next kernel. A longer gap before a late launch has
# another cause: the host loads data, waits for a result, or computes.
_MAX_LAUNCH_GAP_NS = 100_000


@once_per_trace
def time_without_compute(trace: Trace, rank: int) -> dict[str, Union]:
    """Split the time in which the first device of a rank does not compute by its cause.

    Causes, the first that applies:
        communication: Collectives run, and nothing else that is counted before.
        copy: Copies run, and no collective.
        memset: Only memory is set to a value.
        late_launch: Nothing runs, and the host launched the next work after the gap began, at most 0.1 ms later.
        host_busy: Nothing runs, and the host launched the next work more than 0.1 ms after the gap began.
        queue: Nothing runs, although the next work had been launched before the gap began, or needed more than 0.1 ms
            from its launch to its start, and most of the gap.
        unknown: Nothing runs, and the launch of the next work was not recorded.

    Returns:
        Disjoint intervals for each of CAUSES, all within `BusyTime.recorded`; empty where kernels were not recorded.
    """
    busy = busy_time(trace, rank)
    if busy is None:
        return {}
    communication = difference(busy.communication, busy.compute)
    copy = difference(busy.copy, merged(busy.compute, busy.communication))
    memset = difference(busy.memset, merged(busy.compute, busy.communication, busy.copy))
    starts, ends = difference(busy.recorded, busy.all)
    work = [main_kernels(trace, rank), main_transfers(trace, rank)]
    rows = pd.concat([table[["start_ns", "launch_ns"]] for table in work]).dropna(subset="launch_ns")
    launches = rows.groupby("start_ns")["launch_ns"].min().reindex(ends)
    recorded = launches.notna().to_numpy()
    launched = launches.fillna(0).to_numpy(np.int64)
    delay, latency = launched - starts, ends - launched
    queued = (delay <= 0) | ((latency > _MAX_LAUNCH_GAP_NS) & (latency > delay))
    masks = {
        "late_launch": recorded & ~queued & (delay <= _MAX_LAUNCH_GAP_NS),
        "host_busy": recorded & ~queued & (delay > _MAX_LAUNCH_GAP_NS),
        "queue": recorded & queued,
        "unknown": ~recorded,
    }
    causes = {"communication": communication, "copy": copy, "memset": memset}
    return causes | {cause: (starts[mask], ends[mask]) for cause, mask in masks.items()}
