"""The device memory that is free at each position of an iteration, and the bytes of a parameter and its state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.recurring_windows import phase_table, recurring_segments
from ebbtide.analysis.timeseries.thresholds import FreeTimeline
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import RankInfo
from ebbtide.state_bytes import PARAM_BYTES

_FP32_BYTES = 4.0
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class FreeStep(NamedTuple):
    """A step of the free memory over an iteration."""

    phase: str  # The phase, or `other`.
    position: float  # Begin of the step, as a share of the phase.
    free_bytes: float  # Least free memory from there to the next step, over all steady iterations.


@once_per_trace
def free_steps(trace: Trace, rank: int, pool: str | None = None) -> list[FreeStep] | None:
    """Return the free memory of a rank's device, at each position the least over all steady iterations.

    It is the capacity without a pool, by default that of all memory that others cannot use (`free_pool`).

    If a phase has several parts (micro-steps), the least of the whole phase counts: the parts before the last are over
    long before the optimizer has anything to move. The steps are in the order other, forward, backward, update, without
    phases of which nothing was recorded; None if the memory or its capacity is not known.
    """
    pool, capacity = pool or free_pool(trace), capacity_bytes(trace, rank)
    times, used = memory_timeline(trace, rank, pool or "")
    if capacity is None or not len(times):
        return None
    timeline = FreeTimeline(times, capacity - used)
    numbers = steady_iterations(trace).numbers
    free = capacity - phase_peaks(trace, rank, str(pool)).frame
    least = free[free.index.isin(numbers)].min()
    table = phase_table(trace, rank)
    segments = recurring_segments(table[table["iteration"].isin(numbers)])
    steps = []
    for phase in (OTHER, FORWARD, BACKWARD, UPDATE):
        in_phase = [segment for segment in segments if segment.phase == phase]
        if phase in (FORWARD, BACKWARD) and len(in_phase) == 1:
            starts, sizes = in_phase[0].least_free(timeline)
            steps += [FreeStep(phase, float(at), float(size)) for at, size in zip(starts, sizes, strict=True)]
        else:
            steps.append(FreeStep(phase, 0.0, float(least[phase])))
    return [step for step in steps if not np.isnan(step.free_bytes)]


def param_bytes(entry: RankInfo) -> float:
    """Return the bytes per parameter, and per gradient, of the most frequent dtype."""
    counts = entry.model.dtypes
    if not counts:
        return float(PARAM_BYTES)
    dtype = max(counts, key=lambda dtype: counts[dtype])
    return float(_DTYPE_BYTES.get(dtype.removeprefix("torch."), PARAM_BYTES))


def state_bytes(entry: RankInfo) -> float:
    """Return the bytes of state per parameter: an fp32 master weight, and as many fp32 moments as were recorded, or
    two."""
    elements = sum(sum(optimizer.state_dtypes.values()) for optimizer in entry.optimizers)
    params = sum(optimizer.params or 0 for optimizer in entry.optimizers)
    moments = round(elements / params) if elements and params else 2
    return _FP32_BYTES * (1 + max(moments, 0))
