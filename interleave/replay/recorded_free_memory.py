"""The device memory that a recorded job leaves free over an iteration."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ebbtide.analysis.metrics.devices import capacity_bytes, memory_timeline
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.recurring_windows import Envelope, phase_table, recurring_segments
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.analysis.timeseries.thresholds import FreeTimeline
from ebbtide.interleave.model.workload import FreeMemorySteps
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE
from ebbtide.state_bytes import STATE_BYTES

# Steps of the free memory per phase, at most.
_MAX_STEPS = 32


def recorded_free_memory(metrics: TraceMetrics, phase_s: Mapping[str, float]) -> FreeMemorySteps | None:
    """Return the free memory of the first rank's device: at each point the least over all steady iterations.

    Optimizer state that the recorded job kept on the device counts as free, since the replayed policy decides where it
    is kept. If a phase has several parts (micro-steps), the least of the whole phase counts: the parts before the last
    are over long before the optimizer has anything to move.

    Args:
        metrics: The trace.
        phase_s: Lengths of other, forward and backward in the replay, seconds. They come in this order.

    Returns:
        None if it is not known.
    """
    trace = metrics.trace
    pool, rank = metrics.free_pool, trace.ranks[0]
    capacity = capacity_bytes(trace, rank)
    if pool is None or capacity is None or not metrics.has_gpu:
        return None
    times, used = memory_timeline(trace, rank, pool)
    if not len(times):
        return None
    state = _state_on_device(metrics)
    timeline = FreeTimeline(times, capacity - used + state)
    free = capacity + state - phase_peaks(trace, rank, pool)
    free = free[free.index.isin(metrics.steady_iterations)]
    min_free = {phase: float(free[phase].min()) for phase in free.columns}
    table = phase_table(trace, rank, timeline)
    segments = recurring_segments(table[table["iteration"].isin(metrics.steady_iterations)])
    begin = phase_s[OTHER]
    steps = [(0.0, min_free[OTHER])] if begin else []
    for phase in (FORWARD, BACKWARD):
        in_phase = [segment for segment in segments if segment.phase == phase]
        if len(in_phase) == 1:
            envelope = _with_few_steps(in_phase[0].least_free(timeline))
            steps += [(begin + phase_s[phase] * position, size) for position, size in envelope]
        else:
            steps.append((begin, min_free[phase]))
        begin += phase_s[phase]
    steps.append((begin, min_free[UPDATE]))
    recorded = [(time, max(0.0, size)) for time, size in steps if not np.isnan(size)]
    # No memory is known to be free before the first entry.
    return ((0.0, 0.0), *recorded) if recorded and recorded[0][0] > 0 else tuple(recorded) or None


def _with_few_steps(envelope: Envelope) -> list[tuple[float, float]]:
    """Reduce a step function on [0, 1) to a number of steps; of merged neighbours the least counts."""
    positions, values = envelope
    if len(positions) <= _MAX_STEPS:
        return [(float(position), float(value)) for position, value in zip(positions, values, strict=True)]
    edges = np.linspace(0, 1, _MAX_STEPS + 1)[:-1]
    first = np.maximum(np.searchsorted(positions, edges, side="right") - 1, 0)
    after = np.append(np.searchsorted(positions, edges[1:], side="left"), len(positions))
    return [
        (float(edge), float(values[begin : max(end, begin + 1)].min()))
        for edge, begin, end in zip(edges, first, after, strict=True)
    ]


def _state_on_device(metrics: TraceMetrics) -> int:
    """Return the bytes of optimizer state that the recorded job kept on the device of the first rank."""
    job = metrics.deepspeed
    if job is not None and job.offload_config:
        rounded = job.rounded_ratio if job.real_ratio is None else None
        offloaded_share = rounded if rounded is not None else job.cpu_share
        return round((1 - offloaded_share) * STATE_BYTES * (metrics.params or 0))
    optimizers = metrics.entry.optimizers
    if any(device.startswith("cuda") for optimizer in optimizers for device in optimizer.state_devices):
        return sum(optimizer.state_bytes or 0 for optimizer in optimizers)
    return 0
