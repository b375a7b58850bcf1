"""Finds a GPU that is idle for a large part of the iteration, for another cause than late launches."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.activity.iteration_activity import iteration_activity
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text

# Every job has gaps between kernels. More than this share of the iteration is much.
_MIN_SHARE = 0.1
# The causes that this rule reports; `launch_bound` reports late launches.
_CAUSES = {
    "host_busy": "the host launched nothing for over 0.1 ms",
    "queue": "the next work was launched, but had not begun",
    "unknown": "the launch of the next work was not recorded",
}
_ADVICE = {
    "host_busy": "find out what the host does then: loading data, logging, the optimizer on the CPU, or calls that "
    "wait for the GPU, such as loss.item()",
    "queue": "look for dependencies between streams, and for other processes on the GPU",
    "unknown": "record the calls that launch kernels too: torch.profiler with ProfilerActivity.CPU",
}


def check(metrics: TraceMetrics) -> Finding | None:
    """Compare the time in which nothing runs on the GPU with the iteration, of the rank that is idle most."""
    activity, iteration = iteration_activity(metrics.trace), metrics.iteration_ms
    if activity.empty or not iteration:
        return None
    idle_by_rank = sum(activity[f"cause_{cause}"] for cause in _CAUSES)
    rank = int(idle_by_rank.idxmax())
    idle = float(idle_by_rank[rank])
    if idle < _MIN_SHARE * iteration:
        return None
    causes = {cause: float(activity.loc[rank, f"cause_{cause}"]) for cause in _CAUSES}
    by_phase = {phase: float(iteration_activity(metrics.trace, phase).loc[rank, "idle"]) for phase in ITERATION_PARTS}
    places = ", ".join(f"{phase} {ms_text(ms)}" for phase, ms in by_phase.items() if ms > 0.01 * iteration)
    ordered = sorted(causes, key=lambda cause: -causes[cause])
    evidence = [
        f"rank {rank}: nothing runs on the GPU for {ms_text(idle)} of {ms_text(iteration)} "
        f"({100 * idle / iteration:.0f} %), late launches of up to 0.1 ms not included",
        *(f"{ms_text(causes[cause])}: {_CAUSES[cause]}" for cause in ordered if causes[cause] > 0.01 * iteration),
    ]
    if places:
        evidence.append(f"all idle time by phase: {places}")
    return Finding("gpu-idle", "The GPU is idle", clamp_gain(idle), tuple(evidence), _ADVICE[ordered[0]])
