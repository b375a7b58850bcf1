"""Activity of a GPU per iteration and phase.

Also the causes of the time in which it does not compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ebbtide.analysis.metrics.activity.busy_time import all_work, busy_time, main_work
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import (
    PhaseArrays,
    intervals,
    positions,
    steady_iterations,
)
from ebbtide.analysis.timeseries.step_functions import (
    Floats,
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
from ebbtide.profiler.trace.columns import Bools

if TYPE_CHECKING:
    import pandas as pd

# In the order of output, with their texts. Together with `compute` they are the whole
# time.
CAUSE_TEXTS = {
    "communication": "communication runs alone",
    "copy": "copies run, no communication",
    "memset": "memory is being set",
    "late_launch": "idle: next work launched up to 0.1 ms late",
    "host_busy": "idle: host launched nothing for over 0.1 ms",
    "launch_call": "idle: host inside a launching call for over 0.1 ms",
    "queue": "idle: next work launched, but not begun",
    "unknown": "idle: launch not recorded",
}
CAUSES = tuple(CAUSE_TEXTS)
# A host that does nothing but launch needs less than this for the next kernel. A longer
# gap before a late launch has another cause: the host loads data, waits for a result,
# or computes.
_MAX_LAUNCH_GAP_NS = 100_000


@once_per_trace
def time_without_compute(trace: Trace, rank: int) -> dict[str, Union]:
    """Split the time in which a rank's first device does not compute by its cause.

    It is the first that applies of `communication`, `copy` and `memset` (these run) and
    the causes of an idle device. `late_launch`, `host_busy`: the host launched the next
    work after the gap began, at most or more than 0.1 ms later. `launch_call`: the call
    that launched it runs, and takes more than 0.1 ms. `queue`: the host had launched it
    before, or the work needed more than 0.1 ms from its launch to its start, and most
    of the gap. `unknown`: the launch was not recorded.

    Returns disjoint intervals for each of CAUSES within `BusyTime.recorded`; none where
    kernels were not recorded."""
    busy = busy_time(trace, rank)
    if busy is None:
        return {}
    communication = difference(busy.communication, busy.compute)
    copy = difference(busy.copy, merged(busy.compute, busy.communication))
    memset = difference(
        busy.memset, merged(busy.compute, busy.communication, busy.copy)
    )
    starts, ends = difference(busy.recorded, busy.all)
    work = all_work(trace, rank)
    begins, launches = work.starts[work.launched], work.launches[work.launched]
    # The earliest launch of what begins at the same time.
    order = np.lexsort((launches, begins))
    begins, first = np.unique(begins[order], return_index=True)
    position, recorded = positions(begins, ends)
    launched = np.where(recorded, np.append(launches[order][first], 0)[position], 0)
    delay, latency = launched - starts, ends - launched
    queued = (delay <= 0) | ((latency > _MAX_LAUNCH_GAP_NS) & (latency > delay))
    # The part of a gap in which a long call launches the work that ends it.
    returned = _call_ends(trace, rank, launched)
    is_long = recorded & (returned - launched > _MAX_LAUNCH_GAP_NS)
    called = np.where(is_long, np.clip(launched, starts, ends), ends)
    returned = np.where(is_long, np.clip(returned, called, ends), ends)
    queued &= ~is_long
    masks = {
        "late_launch": recorded & ~queued & (delay <= _MAX_LAUNCH_GAP_NS),
        "host_busy": recorded & ~queued & (delay > _MAX_LAUNCH_GAP_NS),
        "queue": recorded & queued,
        "unknown": ~recorded,
    }
    causes = {"communication": communication, "copy": copy, "memset": memset}
    for cause, mask in masks.items():
        own = mask & (called > starts)
        causes[cause] = starts[own], called[own]
    causes["launch_call"] = called[is_long], returned[is_long]
    waiting = returned < ends
    causes["queue"] = merged(causes["queue"], (returned[waiting], ends[waiting]))
    return {cause: causes[cause] for cause in CAUSES}


def _call_ends(trace: Trace, rank: int, launched: Ints) -> Ints:
    """Return when the call that began at each time returned, ns; the time itself where
    no call was recorded."""
    calls = trace.columns(rank, "calls")
    order = np.lexsort((-calls.ints("end_ns"), calls.ints("start_ns")))
    begins, first = np.unique(calls.ints("start_ns")[order], return_index=True)
    position, present = positions(begins, launched)
    ends = np.append(calls.ints("end_ns")[order][first], 0)[position]
    return np.where(present, ends, launched)


# Milliseconds that are measured of each phase: those in which work of a kind or nothing
# runs, and the causes.
COLUMNS = (
    "compute",
    "communication",
    "copy",
    "idle",
    *(f"cause_{cause}" for cause in CAUSES),
)


class PhaseActivityTimes(NamedTuple):
    """Activity of a GPU in each phase of each completely recorded iteration."""

    numbers: Ints  # The iterations.
    # Whether an iteration has a phase; a column for each of ITERATION_PARTS.
    has_phase: Bools
    # By iteration, part of ITERATION_PARTS and COLUMNS; 0 where the iteration lacks the
    # phase.
    ms: Floats


@once_per_trace
def phase_times(trace: Trace, rank: int) -> PhaseActivityTimes | None:
    """Measure the first device of a rank in each phase of each iteration.

    Return None where kernels were not recorded. A kernel belongs to the phase that
    launched it, wherever it runs; without a recorded launch, to the phases in which it
    runs. Copies, idle time and the causes belong to the phase in whose time they are.
    """
    busy, on_device = busy_time(trace, rank), intervals(trace, rank).times_with_other
    on_device = on_device.only(
        np.isin(on_device.iterations, recorded_iterations(trace, rank))
    )
    if busy is None or not len(on_device.starts):
        return None
    starts, ends, numbers = (
        on_device.starts,
        on_device.ends,
        np.unique(on_device.iterations),
    )
    times = {
        f"cause_{cause}": overlap_ns(starts, ends, time)
        for cause, time in time_without_compute(trace, rank).items()
    }
    times["copy"] = overlap_ns(starts, ends, busy.copy)
    times["idle"] = ends - starts - overlap_ns(starts, ends, busy.all)
    groups, count = _groups(on_device, numbers), len(numbers) * len(ITERATION_PARTS)
    sums = {
        name: np.bincount(groups, lengths, count) for name, lengths in times.items()
    }
    has_phase = np.bincount(groups, minlength=count) > 0
    for kind in ("compute", "communication"):
        lengths = union_length_by_group(*_assigned(trace, rank, kind, numbers), count)
        sums[kind] = np.where(has_phase, lengths, 0)
    shape = len(numbers), len(ITERATION_PARTS)
    return PhaseActivityTimes(
        numbers,
        has_phase.reshape(shape),
        np.stack([sums[c] / 1e6 for c in COLUMNS], 1).reshape(*shape, -1),
    )


def recorded_iterations(trace: Trace, rank: int) -> Ints:
    """Return the iterations that lie within the time in which activity was recorded."""
    iterations, spans = intervals(trace, rank), trace.rank(rank).transfers_spans_ns
    if not spans:
        return iterations.numbers
    starts, ends = iterations.starts, iterations.ends
    recorded_starts, recorded_ends = np.array(spans, np.int64).T
    whole: Ints = iterations.numbers[
        overlap_ns(starts, ends, (recorded_starts, recorded_ends)) == ends - starts
    ]
    return whole


def _assigned(
    trace: Trace, rank: int, kind: str, numbers: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return (group, starts, ends) of the kernels of a kind.

    Groups are of `_groups`. A kernel without a launch is divided into parts.
    """
    kernels = main_work(trace, rank, "kernels")
    kernels = kernels.only(kernels.kinds == kind)
    by_launch, by_time = kernels.only(kernels.launched), kernels.only(~kernels.launched)
    host = _ordered(
        intervals(trace, rank, device_times=False).times_with_other, numbers
    )
    index = np.searchsorted(host.starts, by_launch.launches, side="right") - 1
    inside = (index >= 0) & (by_launch.launches < np.append(host.ends, 0)[index])
    device = _ordered(intervals(trace, rank).times_with_other, numbers)
    own, phase = overlapping(by_time.starts, by_time.ends, (device.starts, device.ends))
    groups = [_groups(host, numbers)[index[inside]], _groups(device, numbers)[phase]]
    begins = [
        by_launch.starts[inside],
        np.maximum(by_time.starts[own], device.starts[phase]),
    ]
    finishes = [
        by_launch.ends[inside],
        np.minimum(by_time.ends[own], device.ends[phase]),
    ]
    return np.concatenate(groups), np.concatenate(begins), np.concatenate(finishes)


def _ordered(phases: PhaseArrays, numbers: Ints) -> PhaseArrays:
    """Return phases of some length of the iterations `numbers` in order of time."""
    phases = phases.only(
        np.isin(phases.iterations, numbers) & (phases.ends > phases.starts)
    )
    return phases.only(np.argsort(phases.starts, kind="stable"))


def _groups(phases: PhaseArrays, numbers: Ints) -> Ints:
    """Return the group of each phase: the position of its iteration in `numbers` times
    the number of parts, plus the position of its part."""
    parts = np.select(
        [phases.phases == part for part in ITERATION_PARTS], range(len(ITERATION_PARTS))
    )
    groups: Ints = (
        np.searchsorted(numbers, phases.iterations) * len(ITERATION_PARTS) + parts
    )
    return groups


@once_per_trace
def iteration_activity(trace: Trace, phase: str | None = None) -> pd.DataFrame:
    """Return milliseconds per iteration (COLUMNS), medians over the steady ones, with a
    row per rank with recorded kernels.

    `compute` and `communication` count time in which kernels of several phases run once
    for each. `phase` None: all."""
    import pandas as pd

    rows, steady = {}, steady_iterations(trace).numbers
    for rank in trace.ranks:
        times = phase_times(trace, rank)
        ms = None if times is None else times.ms[np.isin(times.numbers, steady)]
        if ms is not None and len(ms):
            of_phase = (
                ms.sum(axis=1, dtype=np.longdouble)
                if phase is None
                else ms[:, ITERATION_PARTS.index(phase)]
            )
            rows[rank] = np.median(of_phase.astype(np.float64), axis=0)
    return pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS)
