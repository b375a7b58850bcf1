"""The offload policy that a recorded job ran under."""

from __future__ import annotations

from ebbtide.analysis.metrics.deepspeed import deepspeed_of, version_numbers
from ebbtide.profiler.trace import Trace

# The first version of DeepSpeed that copies gradients asynchronously by itself.
_ASYNC_GRADIENTS = (0, 19, 5)


def recorded_policy(trace: Trace) -> str | None:
    """Return the policy's string that a DeepSpeed job ran under.

    It is the policy of ebbtide's engine if that ran the job's updates; otherwise it follows from the configuration.
    `prefetch_optimizer`, `part_grads_async` and `prefetch_optimizer_gap` are the keys of the published implementation
    of interleaving.

    Returns:
        None if it is not known.
    """
    job = deepspeed_of(trace)
    if job is None:
        return None
    if job.info.policy is not None:
        return job.info.policy
    offload = job.offload_config
    stride = offload.get("prefetch_optimizer_gap") if offload.get("prefetch_optimizer") else None
    if offload.get("device") != "cpu" or job.ratio is None or not isinstance(stride, (int, float, type(None))):
        return None
    asynchronous = offload.get("part_grads_async")
    if asynchronous is None:
        asynchronous = version_numbers(job.info.version) >= _ASYNC_GRADIENTS
    grads = "async" if asynchronous else "blocking"
    if stride:
        return f"interleaved:{int(stride)}@{job.ratio:g},grads={grads}"
    name = "zero-offload" if job.ratio == 1 else f"twin-flow:{job.ratio:g}"
    return f"{name},grads={grads}"
