"""Finds communication between GPUs during which nothing computes."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.findings.gpu_time import gpu_time, phase_times_text
from ebbtide.analysis.metrics.activity.collective_skew import collective_skew
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import ms_text

_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare communication without compute with the iteration, of the rank with most of it; without iterations, with
    the time from the first to the last activity."""
    times = gpu_time(metrics)
    if times is None:
        return None
    rank, exposed, total = times.worst(["communication"])
    if exposed < _MIN_SHARE * total:
        return None
    evidence = [
        f"rank {rank}: collectives run while nothing computes for {ms_text(exposed)} of {ms_text(total)} "
        f"({100 * exposed / total:.0f} %)",
    ]
    if by_phase := phase_times_text(metrics, rank, "cause_communication"):
        evidence.append(f"by the phase in whose time they run: {by_phase}")
    skew = collective_skew(metrics.trace)
    if skew is not None:
        waits = {wait.rank: wait.wait_ms for wait in skew.waits}
        evidence.append(
            f"over the whole trace rank {rank} waits {ms_text(waits[rank])} in collectives for ranks that come later"
        )
    return Finding(
        "exposed-communication",
        "The GPU waits for communication with other GPUs",
        times.gain(exposed),
        tuple(evidence),
        "overlap it with compute (larger DDP buckets or FSDP prefetch, a stream of its own), send fewer bytes (bf16 "
        "gradients, accumulation), and even out the ranks' work if they wait for each other",
    )
