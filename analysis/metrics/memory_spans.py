"""The iterations and spans of time in which a memory pool is known."""

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import ALLOCATION_POOLS, memory_timeline
from ebbtide.analysis.metrics.iterations import (
    PhaseArrays,
    intervals,
    positions,
    steady_iterations,
)
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.phases import OTHER
from ebbtide.profiler.trace import Trace

# Pools that the sampler reads from outside the job, at all times.
_SAMPLED = ("device", "rss", "swap", "cgroup")

Spans = tuple[Ints, Ints]


@once_per_trace
def memory_spans(trace: Trace, rank: int, pool: str) -> Spans | None:
    """Return the spans in which a pool is known as (starts, ends) in ns, ascending and
    disjoint; None: at all times."""
    if not trace.meta.options.on_demand or pool in _SAMPLED:
        return None
    if pool in ALLOCATION_POOLS:
        # From the first to the last of them.
        times = memory_timeline(trace, rank, pool)[0]
        return times[:1], times[-1:]
    spans = np.array(
        [detailed.span_ns for detailed in trace.rank(rank).detailed_slices], np.int64
    ).reshape(-1, 2)
    return spans[:, 0], spans[:, 1]


def within_spans(
    spans: Spans | None, starts: Ints, ends: Ints
) -> npt.NDArray[np.bool_]:
    """Return which intervals lie in one of the spans as a whole.

    Return all where `spans` is None.
    """
    if spans is None or not len(starts):
        return np.ones(len(starts), bool)
    position = np.searchsorted(spans[0], starts, side="right") - 1
    last_ends = np.append(spans[1], 0)[position]
    return np.asarray((position >= 0) & (ends <= last_ends))


def in_read_iteration(
    trace: Trace, rank: int, pool: str, phases: PhaseArrays, times: Ints
) -> npt.NDArray[np.bool_]:
    """Return which phases are of iterations in which a pool was read.

    Phases are on the host's clock; the pool was read at `times`, ns, at the end of
    every phase. Return all if there are none. Of a job with very short steps only some
    iterations are read, each as a whole; of a recording on demand, only phases in the
    spans of the pool are.
    """
    if trace.meta.source != "recorded":
        return np.ones(len(phases.starts), bool)
    inside = within_spans(memory_spans(trace, rank, pool), phases.starts, phases.ends)
    ends = inside & (phases.phases != OTHER)
    started = np.unique(phases.iterations[ends])
    missed = np.unique(phases.iterations[ends & ~positions(times, phases.ends)[1]])
    read = np.setdiff1d(started, missed, assume_unique=True)
    return np.asarray(
        inside & np.isin(phases.iterations, read if len(read) else started), bool
    )


def memory_with_gaps(
    trace: Trace, rank: int, pool: str
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Return (times ns, bytes, whether they are known) of a pool.

    Where a gap begins, the last is False.
    """
    times, sizes = memory_timeline(trace, rank, pool)
    spans = memory_spans(trace, rank, pool)
    if spans is None:
        return times, sizes, np.ones(len(times), bool)
    inside = within_spans(spans, times, times)
    times = np.concatenate([times[inside], spans[1]])
    sizes = np.concatenate([sizes[inside], np.zeros(len(spans[1]), np.int64)])
    recorded = np.arange(len(times)) < inside.sum()
    order = np.argsort(times, kind="stable")
    return times[order], sizes[order], recorded[order]


def detailed_iterations(trace: Trace, rank: int) -> list[int]:
    """Return the steady iterations in which a rank recorded details, which are all but
    those between the slices on demand."""
    numbers = steady_iterations(trace).numbers
    if not trace.meta.options.on_demand:
        return numbers
    times = intervals(trace, rank, device_times=False)
    whole = within_spans(memory_spans(trace, rank, ""), times.starts, times.ends)
    return [
        int(number) for number in times.numbers[whole & np.isin(times.numbers, numbers)]
    ]


@once_per_trace
def trace_start_ns(trace: Trace) -> int | None:
    """Return the first time of anything recorded of all ranks; None if nothing was."""
    span = trace.span_ns()
    return None if span is None else span[0]
