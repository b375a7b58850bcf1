"""Finds device memory that is free all the time, above all while optimizer state is in host memory."""

from __future__ import annotations

from ebbtide.analysis.findings.common import record_memory
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.free_profile import param_bytes, state_bytes
from ebbtide.analysis.metrics.static_split import largest_split
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import bytes_text, count_text

_MIN_FREE_BYTES = 2**30
# Without offloaded state: memory that is always free is reported from this share of the device on.
_UNUSED_SHARE = 0.25


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the free memory with the offloaded state and its gradients, by the rules of `largest_split`.

    Without iterations the free memory of the whole trace counts, and there is no gain.
    """
    if not metrics.has_gpu:
        return None
    free, capacity = metrics.always_free_bytes, metrics.capacity_bytes
    if free is None or capacity is None:
        return Unknown("free-memory", "how much device memory is free all the time?", record_memory(metrics))
    moments = "of every steady iteration" if metrics.iteration_ms is not None else "of the trace"
    measured = (
        f"{bytes_text(free)} of {bytes_text(capacity)} are free at every moment {moments} (capacity minus "
        f"{metrics.free_pool})"
    )
    update, offloaded = metrics.phase_ms(UPDATE), metrics.offloaded_params
    split = largest_split(metrics) if free >= _MIN_FREE_BYTES else None
    if split is not None and update and offloaded:
        state, gradient = state_bytes(metrics.entry), param_bytes(metrics.entry)
        evidence = (
            measured,
            f"the optimizer state of {count_text(split.moved_params)} parameters ({state:g} B each, and {gradient:g} B "
            f"of gradients until their update) fits there permanently, {100 * split.moved_params / offloaded:.0f} % of "
            "what this rank offloads",
        )
        return Finding(
            "free-memory",
            "Device memory is free all the time while optimizer state is offloaded",
            clamp_gain(update * split.moved_params / offloaded),
            evidence,
            "do not offload at all"
            if split.ratio == 0
            else "keep that part of the optimizer's state on the device (a static split, in DeepSpeed's configuration "
            f'"offload_optimizer": {{"ratio": {split.ratio:.2f}}})',
        )
    if free < _UNUSED_SHARE * capacity:
        return None
    return Finding(
        "free-memory",
        "Device memory is free all the time",
        None,
        (measured,),
        "a larger batch, longer sequences or less recomputation would use it",
    )
