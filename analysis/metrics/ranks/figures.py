"""Computes the figures of ranks, rank by rank, so that each table is read once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import free_pool, peak_pool, pool_peaks
from ebbtide.analysis.metrics.gpu_state import rank_gpu_totals
from ebbtide.analysis.metrics.iterations import part_counts, rank_durations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.phases import phase_bytes, phase_peaks
from ebbtide.analysis.metrics.ranks.rank_series import rank_series
from ebbtide.analysis.metrics.storage import rank_storage_use
from ebbtide.host_limits import cores
from ebbtide.profiler.trace import Trace

# Computes figures of one rank, which keep their results.
RankFigures = Callable[[Trace, int], object]
# Fewer ranks are measured before threads would help. More threads wait for each other, and each holds tables of a rank.
_MIN_RANKS_FOR_THREADS = 16
_MAX_THREADS = 4


def iteration_figures(trace: Trace, rank: int) -> None:
    """Compute what `ebbtide iterations` needs of a rank."""
    rank_durations(trace, rank)
    rank_series(trace, rank)


def summary_figures(trace: Trace, rank: int) -> None:
    """Compute what `ebbtide summary` needs of a rank."""
    for pool in sorted({pool for pool in (peak_pool(trace), free_pool(trace)) if pool is not None}):
        phase_peaks(trace, rank, pool)
    pool_peaks(trace, rank)
    for direction in DIRECTIONS:
        phase_bytes(trace, rank, direction)
    part_counts(trace, rank)
    rank_storage_use(trace, rank)
    rank_gpu_totals(trace, rank)
    iteration_figures(trace, rank)


@once_per_trace
def measure_ranks(trace: Trace) -> None:
    """Compute `summary_figures` of all ranks.

    Call it before figures of several kinds are computed for all ranks. The tables of a large job do not fit into memory
    together: kind by kind, they would be read several times.
    """
    if len(trace.ranks) < _MIN_RANKS_FOR_THREADS:
        for rank in trace.ranks:
            summary_figures(trace, rank)
        return
    with ThreadPoolExecutor(min(cores(), _MAX_THREADS)) as threads:
        list(threads.map(lambda rank: summary_figures(trace, rank), trace.ranks))
