"""Activity of a GPU per iteration and phase, and the causes of the time in which it does not compute."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.activity.busy_time import busy_time, main_kernels, main_transfers
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.timeseries.step_functions import (
    Ints,
    Union,
    difference,
    merged,
    overlap_ns,
    overlapping,
    union_length_by_group,
)
from ebbtide.phases import ITERATION_PARTS
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


@once_per_trace
def phase_activity(trace: Trace, rank: int) -> pd.DataFrame:
    """Measure the first device of a rank in each phase of each iteration.

    A kernel belongs to the phase that launched it, wherever it runs; one whose launch was not recorded, to the phases
    in which it runs. Copies, idle time and the causes belong to the phase in whose time they are. The table has a row
    per phase of each iteration that was recorded as a whole, with columns iteration, phase and, in ms: compute,
    communication, copy, idle (nothing runs), and `cause_` with each of CAUSES. Empty where kernels were not recorded.
    """
    busy = busy_time(trace, rank)
    columns = ["iteration", "phase", "compute", "communication", "copy", "idle", *(f"cause_{c}" for c in CAUSES)]
    on_device = intervals(trace, rank).with_other
    if busy is None or on_device.empty:
        return pd.DataFrame(columns=columns)
    on_device = on_device[on_device["iteration"].isin(_recorded_iterations(trace, rank))]
    on_device = on_device.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    starts, ends = on_device["start_ns"].to_numpy(np.int64), on_device["end_ns"].to_numpy(np.int64)
    times = {
        f"cause_{cause}": overlap_ns(starts, ends, time) for cause, time in time_without_compute(trace, rank).items()
    }
    times["copy"] = overlap_ns(starts, ends, busy.copy)
    times["idle"] = ends - starts - overlap_ns(starts, ends, busy.all)
    numbers = np.unique(on_device["iteration"])
    sums = on_device[["iteration", "phase"]].assign(**times).groupby(["iteration", "phase"]).sum()
    for kind in ("compute", "communication"):
        rows = _assigned(trace, rank, kind, numbers)
        lengths = union_length_by_group(*rows, len(numbers) * len(ITERATION_PARTS))
        index = pd.MultiIndex.from_product([numbers, ITERATION_PARTS])
        sums[kind] = pd.Series(lengths, index=index).reindex(sums.index)
    return (sums / 1e6).reset_index()[columns]


def _recorded_iterations(trace: Trace, rank: int) -> Ints:
    """Return the iterations that lie within the time in which activity was recorded."""
    iterations, spans = intervals(trace, rank).spans, trace.rank(rank).transfers_spans_ns
    numbers: Ints = iterations["iteration"].to_numpy(np.int64)
    if not spans:
        return numbers
    starts, ends = iterations["start_ns"].to_numpy(np.int64), iterations["end_ns"].to_numpy(np.int64)
    recorded_starts, recorded_ends = np.array(spans, np.int64).T
    whole: Ints = numbers[overlap_ns(starts, ends, (recorded_starts, recorded_ends)) == ends - starts]
    return whole


def _assigned(trace: Trace, rank: int, kind: str, numbers: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (group, starts, ends) of the kernels of a kind, or of the parts of a kernel without a recorded launch.

    The group is the position of the iteration in `numbers` times the number of parts, plus the position of the phase.
    """
    kernels = main_kernels(trace, rank)
    kernels = kernels[kernels["kind"] == kind]
    launched = kernels["launch_ns"].notna()
    by_launch, by_time = kernels[launched], kernels[~launched]
    host = _ordered(intervals(trace, rank, device_times=False).with_other, numbers)
    launches = by_launch["launch_ns"].to_numpy(np.int64)
    index = np.searchsorted(host["start_ns"].to_numpy(np.int64), launches, side="right") - 1
    inside = (index >= 0) & (launches < host["end_ns"].to_numpy(np.int64)[index])
    device = _ordered(intervals(trace, rank).with_other, numbers)
    starts, ends = by_time["start_ns"].to_numpy(np.int64), by_time["end_ns"].to_numpy(np.int64)
    phase_starts, phase_ends = device["start_ns"].to_numpy(np.int64), device["end_ns"].to_numpy(np.int64)
    own, phase = overlapping(starts, ends, (phase_starts, phase_ends))
    groups = [host["group"].to_numpy(np.int64)[index[inside]], device["group"].to_numpy(np.int64)[phase]]
    begins = [by_launch["start_ns"].to_numpy(np.int64)[inside], np.maximum(starts[own], phase_starts[phase])]
    finishes = [by_launch["end_ns"].to_numpy(np.int64)[inside], np.minimum(ends[own], phase_ends[phase])]
    return np.concatenate(groups), np.concatenate(begins), np.concatenate(finishes)


def _ordered(phases: pd.DataFrame, numbers: Ints) -> pd.DataFrame:
    """Return phases of some length of the iterations `numbers` in order of time, with their `group`."""
    phases = phases[phases["iteration"].isin(numbers) & (phases["end_ns"] > phases["start_ns"])]
    phases = phases.sort_values("start_ns", ignore_index=True)
    parts = phases["phase"].map({part: number for number, part in enumerate(ITERATION_PARTS)})
    return phases.assign(group=np.searchsorted(numbers, phases["iteration"]) * len(ITERATION_PARTS) + parts)


@once_per_trace
def iteration_activity(trace: Trace, phase: str | None = None) -> pd.DataFrame:
    """Return milliseconds per iteration, medians over the steady iterations: a row per rank with recorded kernels.

    Columns are those of `phase_activity` without iteration and phase. Kernels of several phases may run at once, so
    `compute` and `communication` count such time once for each phase. `phase` None: all of them.
    """
    rows = {}
    for rank in trace.ranks:
        table = phase_activity(trace, rank)
        table = table[table["iteration"].isin(steady_iterations(trace).numbers)]
        if len(table):
            figures = table.drop(columns=["iteration", "phase"]).where(table["phase"].eq(phase) | (phase is None), 0.0)
            rows[rank] = figures.groupby(table["iteration"]).sum().median()
    return pd.DataFrame.from_dict(rows, orient="index")
