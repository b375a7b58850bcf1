"""Finds updates that wait for optimizer state to arrive from storage."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text, ms_text, rate_text

_MIN_WAIT_SHARE = 0.1


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the time in which the job waits for reads with the iteration."""
    uses = [use for use in metrics.storage if use.direction == "read" and use.wait_ms is not None]
    use, iteration = max(uses, key=lambda use: use.wait_ms or 0.0, default=None), metrics.iteration_ms
    if use is None or use.wait_ms is None or not iteration or use.wait_ms < _MIN_WAIT_SHARE * iteration:
        return None
    evidence = (
        f"rank {use.rank} waits {ms_text(use.wait_ms)} per iteration for reads, {100 * use.wait_ms / iteration:.0f} % "
        f"of its time",
        f"it reads {bytes_text(use.bytes)} per iteration; while reads are in flight, "
        f"{rate_text(use.bytes / use.in_flight_ms * 1e3)}",
    )
    pipelined = metrics.deepspeed is not None and metrics.deepspeed.offload_config.get("pipeline_read") is True
    advice = (
        "move fewer bytes: smaller subgroups, gradients in host memory, as much of the state in host memory as fits "
        '(offload_optimizer.device "cpu" if all of it does), or more drives'
    )
    if metrics.deepspeed is not None and not pipelined:
        advice = "set offload_optimizer.pipeline_read: true, with enough buffers (buffer_count); then " + advice
    return Finding(
        "storage-waits", "The update waits for reads from storage", clamp_gain(use.wait_ms), evidence, advice
    )
