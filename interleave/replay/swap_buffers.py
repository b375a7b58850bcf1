"""The host memory of a recorded job whose optimizer state DeepSpeed swaps to storage."""

from __future__ import annotations

from ebbtide.analysis.metrics.deepspeed import DEFAULT_SWAP_BUFFERS
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES

_FP32_BYTES = 4


def swap_buffer_bytes(metrics: TraceMetrics) -> int | None:
    """Return the bytes of host memory that a job used for state on storage; None if its state was not there.

    DeepSpeed has `buffer_count` buffers, each of the largest subgroup in fp32. It also holds gradients in half
    precision and parameters that are copied up, and fp32 gradients unless these go to storage too
    (runtime/swap_tensor/optimizer_utils.py, runtime/zero/stage3.py).
    """
    job = metrics.deepspeed
    if job is None or job.offload_config.get("device") != "nvme" or not job.subgroups:
        return None
    count = job.offload_config.get("buffer_count", DEFAULT_SWAP_BUFFERS)
    on_storage = job.info.largest_stored_gradient_bytes is not None
    per_param = PARAM_BYTES + GRAD_BYTES + (0 if on_storage else _FP32_BYTES)
    return int(count) * _FP32_BYTES * max(job.subgroups) + per_param * sum(job.subgroups)
