"""Finds updated parameters that the CPU converts and then copies to the device from pageable memory."""

from __future__ import annotations

from ebbtide.analysis.findings.common import ENABLE_ENGINE, MIN_SHARE
from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text, ms_text, rate_text


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare DeepSpeed's sub-step `parameters` with a copy of its bytes at the link's peak."""
    job, step, iteration = metrics.deepspeed, metrics.sub_step("parameters"), metrics.iteration_ms
    if job is None or job.info.masters_pinned is not False or not metrics.offloaded or step is None or not iteration:
        return None
    step_ms, peak = step.median_ms, metrics.peak_bytes_per_s
    if not step.bytes or step_ms < MIN_SHARE * iteration:
        return None
    gain = clamp_gain(step_ms - step.bytes / peak * 1e3) if peak else None
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    carries = f", over a link that carries {rate_text(peak)}" if peak else ""
    evidence = [
        f"`parameters` takes {ms_text(step_ms)} per iteration for {bytes_text(step.bytes)}: "
        f"{rate_text(step.bytes / step_ms * 1e3)}{carries}",
        "DeepSpeed's fp32 masters are in pageable memory: the CPU converts them, and the copy keeps the host waiting",
    ]
    if step.h2d.pageable_share is not None:
        evidence.append(f"a pageable copy runs for {100 * step.h2d.pageable_share:.0f} % of that time")
    return Finding(
        "pageable-masters",
        "Updated parameters are copied from pageable memory",
        gain,
        tuple(evidence),
        f"offload_optimizer.pin_memory pins gradients, not masters; {ENABLE_ENGINE} keeps them pinned, and uploads "
        "overlap",
    )
