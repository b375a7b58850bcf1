"""The device memory of a recorded job, taken apart: parameters, gradients, and activations."""

from __future__ import annotations

from ebbtide.analysis.metrics.devices import capacity_bytes
from ebbtide.analysis.metrics.recorded_free_memory import recorded_free_memory
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.provisioning.training_job import MemoryPoint, OwnMemory
from ebbtide.interleave.provisioning.transformer import checkpointed_share, guessed_layers
from ebbtide.interleave.provisioning.workload_on_machine import points_of
from ebbtide.phases import BACKWARD, FORWARD, OTHER
from ebbtide.profiler.trace import Trace

_GATHERED_LAYERS = 2


def recorded_memory(trace: Trace, workload: Workload, gradients_held: bool) -> tuple[OwnMemory | None, float | None]:
    """Return the memory of a job beside its optimizer state, and the recorded bytes of state per parameter.

    What every moment of the iteration has is fixed, but for the parameters. Of the rest, gradients that stay on the
    device are counted as they are computed in the backward; all else counts as activations.

    Args:
        trace: The trace.
        workload: Its workload.
        gradients_held: Whether gradients stay on the device until the step.

    Returns:
        None where the memory of the device is not known; None where the state is not known to be on the device.
    """
    metrics = TraceMetrics(trace)
    capacity = capacity_bytes(trace, trace.ranks[0])
    if workload.gpu_free is None or capacity is None:
        return None, None
    lengths = workload.other_s, workload.forward_s, workload.backward_s
    # Not `gpu_free`, which is 0 where a predicted job needs more than the device has.
    free = recorded_free_memory(metrics, dict(zip((OTHER, FORWARD, BACKWARD), lengths, strict=True)))
    used = points_of(free or (), lengths, float(capacity))
    least = min(size for _, size in used)
    model = metrics.entry.model
    params = float(model.bytes) if model.bytes is not None else workload.param_bytes * workload.params
    params = min(params, max(least, 0.0))
    all_gradients = workload.grad_bytes * workload.params if gradients_held else 0.0
    points = []
    for point, size in used:
        gradients = min(all_gradients * min(max(point - 2, 0.0), 1.0), size - least)
        points.append(MemoryPoint(point, gradients, size - least - gradients))
    total = model.total_params or workload.params
    several = (metrics.entry.world_size or len(trace.ranks)) > 1
    memory = OwnMemory(
        fixed_bytes=least - params,
        param_bytes=params,
        gather_bytes=0.0 if several else _GATHERED_LAYERS * workload.param_bytes * total / guessed_layers(total),
        points=tuple(points),
        checkpointed=checkpointed_share(total),
    )
    return memory, _state_bytes_on_device(metrics)


def _state_bytes_on_device(metrics: TraceMetrics) -> float | None:
    optimizers = metrics.entry.optimizers
    on_device = any(device.startswith("cuda") for optimizer in optimizers for device in optimizer.state_devices)
    total = sum(optimizer.state_bytes or 0 for optimizer in optimizers)
    return total / metrics.params if on_device and total and metrics.params else None
