"""Finds a GPU that is idle for a large part of the iteration, for another cause than late launches."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.findings.gpu_time import gpu_time, phase_times_text
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
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
    """Compare the time in which nothing runs on the GPU with the iteration, of the rank that is idle most; without
    iterations, with the time from the first to the last activity."""
    times = gpu_time(metrics)
    if times is None:
        return None
    rank, idle, total = times.worst(list(_CAUSES))
    if idle < _MIN_SHARE * total:
        return None
    causes = {cause: float(times.by_rank.loc[rank, f"cause_{cause}"]) for cause in _CAUSES}
    ordered = sorted(causes, key=lambda cause: -causes[cause])
    evidence = [
        f"rank {rank}: nothing runs on the GPU for {ms_text(idle)} of {ms_text(total)} "
        f"({100 * idle / total:.0f} %), late launches of up to 0.1 ms not included",
        *(f"{ms_text(causes[cause])}: {_CAUSES[cause]}" for cause in ordered if causes[cause] > 0.01 * total),
    ]
    if by_phase := phase_times_text(metrics, rank, "idle"):
        evidence.append(f"all idle time by phase: {by_phase}")
    return Finding("gpu-idle", "The GPU is idle", times.gain(idle), tuple(evidence), _ADVICE[ordered[0]])
