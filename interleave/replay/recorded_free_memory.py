"""The device memory that a recorded job leaves free over an iteration."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ebbtide.analysis.metrics.free_profile import free_steps
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.interleave.model.workload import FreeMemorySteps
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE
from ebbtide.state_bytes import STATE_BYTES

# Steps of the free memory per phase, at most.
_MAX_STEPS = 32


def recorded_free_memory(metrics: TraceMetrics, phase_s: Mapping[str, float]) -> FreeMemorySteps | None:
    """Return the free memory of the first rank's device: at each point the least over all steady iterations.

    Optimizer state that the recorded job kept on the device counts as free, since the replayed policy decides where it
    is kept.

    Args:
        metrics: The trace.
        phase_s: Lengths of other, forward and backward in the replay, seconds. They come in this order.

    Returns:
        None if it is not known.
    """
    if not metrics.has_gpu:
        return None
    recorded = free_steps(metrics.trace, metrics.trace.ranks[0])
    if recorded is None:
        return None
    state = _state_on_device(metrics)
    steps = []
    begin = 0.0
    for phase in (OTHER, FORWARD, BACKWARD, UPDATE):
        in_phase = [(step.position, step.free_bytes + state) for step in recorded if step.phase == phase]
        if phase_s.get(phase, 1.0):
            steps += [
                (begin + phase_s.get(phase, 0.0) * position, max(0.0, size))
                for position, size in _with_few_steps(in_phase)
            ]
        begin += phase_s.get(phase, 0.0)
    # No memory is known to be free before the first entry.
    return ((0.0, 0.0), *steps) if steps and steps[0][0] > 0 else tuple(steps) or None


def _with_few_steps(steps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a step function on [0, 1) to a number of steps; of merged neighbours the least counts."""
    if len(steps) <= _MAX_STEPS:
        return steps
    positions, values = np.array(steps).T
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
        return round((1 - job.cpu_share) * STATE_BYTES * (metrics.params or 0))
    optimizers = metrics.entry.optimizers
    if any(device.startswith("cuda") for optimizer in optimizers for device in optimizer.state_devices):
        return sum(optimizer.state_bytes or 0 for optimizer in optimizers)
    return 0
