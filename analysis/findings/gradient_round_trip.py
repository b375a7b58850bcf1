"""Finds gradients that DeepSpeed copies to the host in half precision, back to the device, and down again in fp32."""

from __future__ import annotations

from ebbtide.analysis.findings.common import ENABLE_ENGINE, MIN_SHARE
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import BACKWARD
from ebbtide.state_bytes import GRAD_BYTES
from ebbtide.units import bytes_text

# DeepSpeed's ZeRO-3 moves 6 B a parameter down and 2 B up. If more than this many times the 2 B needed go down,
# gradients make that round trip.
_ROUND_TRIP = 1.5


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the bytes that go down in the backward with one copy of the gradients in half precision."""
    job, params, iteration = metrics.deepspeed, metrics.params, metrics.iteration_ms
    if job is None or job.info.policy or job.stage != 3 or not metrics.offloaded or not params or not iteration:
        return None
    down, up = metrics.phase_link(BACKWARD, "d2h"), metrics.phase_link(BACKWARD, "h2d")
    if down is None or down.bytes is None:
        return Unknown(
            "gradient-round-trip",
            "how often do gradients cross the link? DeepSpeed's ZeRO-3 takes them down, up and down again",
            "record copies: ebbtide profile --transfers, or counters of the link",
        )
    # Gradients of a resident part go down too: their buffers are on the host for every ratio.
    needed = GRAD_BYTES * params
    if down.bytes < _ROUND_TRIP * needed:
        return None
    # Offloaded parameters go up in the backward too; then none of the bytes up are counted as gradients.
    back = 0.0 if up is None or up.bytes is None or job.zero_config.get("offload_param") else min(up.bytes, needed)
    costs = [_part_ms(metrics, down.busy_ms, down.bytes, down.bytes - needed)]
    if back and up is not None and up.bytes:
        costs.append(_part_ms(metrics, up.busy_ms, up.bytes, back))
    recorded = [cost for cost in costs if cost is not None]
    gain = clamp_gain(sum(recorded), metrics.phase_ms(BACKWARD) or iteration) if recorded else None
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    evidence = (
        f"in the backward {bytes_text(down.bytes)} go down, {down.bytes / params:.1f} B a parameter, and "
        f"{bytes_text(up.bytes if up is not None else None)} up; one copy in half precision is {bytes_text(needed)}",
        "DeepSpeed's ZeRO-3 takes each gradient down, back up, and down again in fp32",
    )
    return Finding(
        "gradient-round-trip",
        "Gradients cross the link more than once",
        gain,
        evidence,
        f"{ENABLE_ENGINE} takes each down once, in half precision",
    )


def _part_ms(metrics: TraceMetrics, busy_ms: float | None, moved: float, part: float) -> float | None:
    """Return the time of a part of the moved bytes: by the copies' own time, else at the link's peak."""
    if busy_ms is not None:
        return busy_ms * part / moved
    return part / metrics.peak_bytes_per_s * 1e3 if metrics.peak_bytes_per_s else None
