"""Finds gradients that DeepSpeed writes to storage although they would stay in host memory with a larger block size."""

from __future__ import annotations

from ebbtide.analysis.findings.common import MIN_SHARE
from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.deepspeed import DeepSpeedSetup
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

_FP32_BYTES = 4
# DeepSpeed swaps tensors of at least aio.block_size, or of this if that is more (swap_tensor/utils.py, aio defaults).
_DEFAULT_BLOCK_BYTES = 2**20


def check(metrics: TraceMetrics) -> Finding | None:
    """Sum the bytes of gradients that are written and read, and find the block size that avoids them."""
    job, iteration = metrics.deepspeed, metrics.iteration_ms
    moved = sum(use.gradient_bytes for use in metrics.storage)
    if job is None or not moved or not iteration:
        return None
    total, waits_ms = sum(use.bytes for use in metrics.storage), sum(use.wait_ms or 0.0 for use in metrics.storage)
    gain_ms = clamp_gain(waits_ms * moved / total / len(metrics.trace.ranks))
    gain = gain_ms if gain_ms >= MIN_SHARE * iteration else None
    block = (job.info.config.get("aio") or {}).get("block_size", _DEFAULT_BLOCK_BYTES)
    evidence = [
        f"{bytes_text(moved)} of the {bytes_text(total)} that are read and written per iteration are fp32 gradients",
        f"aio.block_size is {bytes_text(block)}; DeepSpeed writes pieces of gradients of this size or more to storage",
    ]
    return Finding(
        "gradients-on-storage", "Gradients go to storage and back", gain, tuple(evidence), _advice(job, evidence)
    )


def _advice(job: DeepSpeedSetup, evidence: list[str]) -> str:
    pieces, subgroups = job.info.largest_stored_gradient_bytes, job.subgroups
    if pieces is None or not subgroups:
        return "raise aio.block_size above the largest piece of a gradient, up to the smallest subgroup's fp32 bytes"
    smallest = _FP32_BYTES * min(subgroups)
    if smallest <= pieces:
        return (
            f"raise sub_group_size, so that subgroups have more than one parameter each, then set aio.block_size above "
            f"{pieces:,}"
        )
    return (
        f"set aio.block_size to {smallest:,}, the smallest subgroup in fp32 (the largest piece of a gradient has "
        f"{pieces:,}): gradients then stay in host memory, which takes {_FP32_BYTES} B per parameter there"
    )
