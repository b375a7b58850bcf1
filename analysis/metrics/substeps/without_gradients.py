"""Measures the forwards without gradients, a named part of `other`."""

from __future__ import annotations

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.substeps.operations import op_names, remove_overlaps, split_by_phase
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.phases import OTHER
from ebbtide.profiler.agent.without_gradients import NAME as WITHOUT_GRADIENTS
from ebbtide.profiler.trace import Trace


@once_per_trace
def without_gradients_ms(trace: Trace, rank: int | None = None) -> float | None:
    """Return the time of `other` in which forwards without gradients run: reference models, generation, evaluation.

    The median over the steady iterations, on a rank, or the slowest one (None); None where none were recorded.
    """
    numbers = steady_iterations(trace).numbers
    longest = np.zeros(len(numbers))
    ranks = [one for one in trace.ranks if rank in (None, one) and WITHOUT_GRADIENTS in op_names(trace, one)]
    for one in ranks:
        rows, _ = split_by_phase(trace, one, numbers)
        rows = remove_overlaps(rows[(rows["name"] == WITHOUT_GRADIENTS) & (rows["phase"] == OTHER)], ["iteration"])
        sums = (rows["end_ns"] - rows["start_ns"]).groupby(rows["iteration"]).sum()
        longest = np.maximum(longest, sums.reindex(numbers, fill_value=0).to_numpy(np.float64) / 1e6)
    return median_or_none(longest) if ranks else None
