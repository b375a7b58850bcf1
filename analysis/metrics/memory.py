"""Measures each memory pool per phase, and the gaps between pools.

A gap is between pools that count the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import (
    PhaseArrays,
    intervals,
    steady_iterations,
)
from ebbtide.analysis.metrics.memory_spans import in_read_iteration
from ebbtide.analysis.metrics.phases import largest_by_part
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Ints, merge_times, peak_between
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import AllocatorState

# Gap -> (upper pool, lower pool): two counts of the same memory.
GAPS = {
    "fragmentation": ("reserved", "allocated"),
    "outside torch": ("device", "reserved"),
}


@dataclass(frozen=True)
class PoolUse:
    """Bytes of a pool in one phase of a rank."""

    rank: int
    # The phase, or `other`; None for the whole of a trace without iterations, whose
    # smallest and largest values low and peak are then.
    phase: str | None
    pool: str
    low_bytes: int  # Smallest value in an iteration, median over the steady iterations.
    peak_bytes: int  # Largest value in an iteration, median over the steady iterations.


@dataclass(frozen=True)
class Gap:
    """Difference of two memory counts in one phase of a rank, computed at each moment;
    low and peak are as in `PoolUse`."""

    rank: int
    phase: str | None  # The phase, or `other`; None as in `PoolUse`.
    # `fragmentation` (reserved - allocated), `outside torch` (device - reserved) or
    # `free` (capacity - the pool of `free_pool`).
    gap: str
    low_bytes: int  # Smallest value in an iteration, median over the steady iterations.
    peak_bytes: int  # Largest value in an iteration, median over the steady iterations.


@dataclass(frozen=True, repr=False)
class MemoryUse(TabularResult, table="pools"):
    """Recorded pools and gaps of every rank and phase.

    Attributes:
        pools: The pools.
        gaps: The differences between pools.
        allocators: (rank, segments of torch's allocator at the end of a memory
            snapshot), of each device.
    """

    pools: list[PoolUse]
    gaps: list[Gap]
    allocators: tuple[tuple[int, AllocatorState], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide memory --json` prints."""
        allocators = [
            {"rank": rank, **msgspec.structs.asdict(state)}
            for rank, state in self.allocators
        ]
        return {
            "pools": [asdict(pool) for pool in self.pools],
            "gaps": [asdict(gap) for gap in self.gaps],
            "allocators": allocators,
        }


def memory_use(trace: Trace, ranks: Sequence[int] | None = None) -> MemoryUse:
    """Measure the pools and gaps of some ranks, or of all if None."""
    uses = [
        rank_memory_use(trace, rank)
        for rank in (trace.ranks if ranks is None else ranks)
    ]
    return MemoryUse(
        [pool for use in uses for pool in use.pools],
        [gap for use in uses for gap in use.gaps],
        tuple(allocator for use in uses for allocator in use.allocators),
    )


@once_per_trace
def rank_memory_use(trace: Trace, rank: int) -> MemoryUse:
    """Measure the pools and gaps of one rank."""
    pools: list[PoolUse] = []
    gaps: list[Gap] = []
    iterations = steady_iterations(trace).numbers
    pool_of_free = free_pool(trace)
    phases = intervals(trace, rank, device_times=False).times_with_other
    phases = phases.only(np.isin(phases.iterations, iterations))
    timelines = {
        pool: memory_timeline(trace, rank, pool)
        for pool in sorted(trace.labels(rank, "memory", "pool"))
    }
    for pool, timeline in timelines.items():
        use = _per_phase(trace, rank, pool, phases, timeline)
        pools += [PoolUse(rank, phase, pool, low, peak) for phase, low, peak in use]
    differences = {
        gap: difference(timelines[upper], timelines[lower])
        for gap, (upper, lower) in GAPS.items()
        if upper in timelines and lower in timelines
    }
    capacity = capacity_bytes(trace, rank)
    if capacity is not None and pool_of_free in timelines:
        times, used = timelines[pool_of_free]
        differences["free"] = times, np.maximum(capacity - used, 0)
    for gap, timeline in differences.items():
        # The job itself reads the lower pool, which may be known less often.
        pool = GAPS[gap][1] if gap in GAPS else str(pool_of_free)
        use = _per_phase(trace, rank, pool, phases, timeline)
        gaps += [Gap(rank, phase, gap, low, peak) for phase, low, peak in use]
    return MemoryUse(
        pools, gaps, tuple((rank, state) for state in trace.rank(rank).allocators)
    )


def difference(upper: tuple[Ints, Ints], lower: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Subtract one step function, (times ns, values), from another.

    The result begins where both have a value. Both count the same memory: the
    difference is 0 where samples of different moments make the lower one larger.
    """
    times = merge_times(upper[0], lower[0])
    times = times[times >= max(upper[0][0], lower[0][0])]
    values = [
        sizes[np.searchsorted(edges, times, side="right") - 1]
        for edges, sizes in (upper, lower)
    ]
    return times, np.maximum(values[0] - values[1], 0)


def _per_phase(
    trace: Trace, rank: int, pool: str, phases: PhaseArrays, timeline: tuple[Ints, Ints]
) -> list[tuple[str | None, int, int]]:
    """Return (phase, low, peak) of a timeline: medians over the iterations in which
    `pool` was read; without iterations, of the whole trace."""
    times, values = timeline
    if not steady_iterations(trace).numbers:
        return [(None, int(values.min()), int(values.max()))]
    phases = phases.only(in_read_iteration(trace, rank, pool, phases, times))
    peaks = peak_between(times, values, phases.starts, phases.ends)
    negated_lows = peak_between(times, -values, phases.starts, phases.ends)
    highest, negated_lowest = (
        largest_by_part(phases, of_phases).columns
        for of_phases in (peaks, negated_lows)
    )
    medians = {
        part: (median_or_none(negated_lowest[part]), median_or_none(highest[part]))
        for part in ITERATION_PARTS
    }
    return [
        (phase, round(-low), round(peak))
        for phase, (low, peak) in medians.items()
        if low is not None and peak is not None
    ]
