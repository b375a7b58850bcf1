"""Computes the figures of all ranks, rank by rank, so that each table is read once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import free_pool, peak_pool, pool_peaks
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.host_limits import cores
from ebbtide.profiler.trace import Trace

# Fewer ranks are measured before threads would help. More threads wait for each other, and each holds tables of a rank.
_MIN_RANKS_FOR_THREADS = 16
_MAX_THREADS = 4


@once_per_trace
def measure_ranks(trace: Trace) -> None:
    """Compute `phase_peaks`, `pool_peaks` and `phase_bytes` of each rank, which keep their results.

    Call it before figures of several kinds are computed for all ranks. The tables of a large job do not fit into memory
    together: kind by kind, they would be read several times.
    """
    pools = {pool for pool in (peak_pool(trace), free_pool(trace)) if pool is not None}

    def measure(rank: int) -> None:
        for pool in sorted(pools):
            phase_peaks(trace, rank, pool)
        pool_peaks(trace, rank)
        for direction in DIRECTIONS:
            phase_bytes(trace, rank, direction)

    if len(trace.ranks) < _MIN_RANKS_FOR_THREADS:
        for rank in trace.ranks:
            measure(rank)
        return
    with ThreadPoolExecutor(min(cores(), _MAX_THREADS)) as threads:
        list(threads.map(measure, trace.ranks))
