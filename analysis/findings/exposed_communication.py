"""Finds communication between GPUs during which nothing computes."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.activity.collective_skew import collective_skew
from ebbtide.analysis.metrics.activity.iteration_activity import iteration_activity
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text

_MIN_SHARE = 0.05


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare communication without compute with the iteration, of the rank with most of it."""
    activity, iteration = iteration_activity(metrics.trace), metrics.iteration_ms
    if activity.empty or not iteration:
        return None
    rank = int(activity["cause_communication"].idxmax())
    exposed = float(activity.loc[rank, "cause_communication"])
    if exposed < _MIN_SHARE * iteration:
        return None
    by_phase = {
        phase: float(iteration_activity(metrics.trace, phase).loc[rank, "cause_communication"])
        for phase in ITERATION_PARTS
    }
    evidence = [
        f"rank {rank}: collectives run while nothing computes for {ms_text(exposed)} of {ms_text(iteration)} "
        f"({100 * exposed / iteration:.0f} %)",
        "by the phase in whose time they run: "
        + ", ".join(f"{phase} {ms_text(ms)}" for phase, ms in by_phase.items() if ms > 0.01 * iteration),
    ]
    skew = collective_skew(metrics.trace)
    if skew is not None:
        waits = {wait.rank: wait.wait_ms for wait in skew.waits}
        evidence.append(
            f"over the whole trace rank {rank} waits {ms_text(waits[rank])} in collectives for ranks that come later"
        )
    return Finding(
        "exposed-communication",
        "The GPU waits for communication with other GPUs",
        clamp_gain(exposed),
        tuple(evidence),
        "overlap it with compute (larger DDP buckets or FSDP prefetch, a stream of its own), send fewer bytes (bf16 "
        "gradients, accumulation), and even out the ranks' work if they wait for each other",
    )
