"""Rules on the time of the GPU."""

from typing import NamedTuple

import pandas as pd

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import KERNELS
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text


class GpuTime(NamedTuple):
    """Time of the GPU of each rank."""

    # A row per rank with recorded kernels, in ms: `total`, `compute`, and `cause_` with each cause of time without
    # compute.
    by_rank: pd.DataFrame
    whole_trace: bool  # Whether it is of the whole trace, which has no iterations, and not of the median iteration.

    def gain(self, milliseconds: float) -> float | None:
        """Return a time as a gain per iteration; None of a whole trace."""
        return None if self.whole_trace else clamp_gain(milliseconds)

    def worst(self, causes: list[str]) -> tuple[int, float, float]:
        """Return the rank on which some causes have the largest share, their ms there, and its total ms."""
        times = self.by_rank[[f"cause_{cause}" for cause in causes]].sum(axis=1)
        rank = int((times / self.by_rank["total"]).idxmax())
        return rank, float(times[rank]), float(self.by_rank.loc[rank, "total"])


def gpu_time(metrics: JobMetrics) -> GpuTime | None:
    """Return the time of the GPUs; None where no kernels were recorded."""
    iteration = metrics.iteration_ms
    if iteration is not None:
        activity = metrics.iteration_activity()
        return GpuTime(activity.assign(total=iteration), False) if len(activity) and iteration else None
    rows = {}
    for rank in metrics.by_rank:
        activity = rank.activity
        if activity.total.span_ms:
            causes = {f"cause_{cause}": ms for cause, ms in activity.without_compute.items()}
            rows[rank.rank] = {"total": activity.total.span_ms, "compute": activity.total.compute_ms, **causes}
    return GpuTime(pd.DataFrame.from_dict(rows, orient="index"), True) if rows else None


def phase_times_text(metrics: JobMetrics, rank: int, column: str) -> str:
    """Return the time of a column of `phase_activity` in each phase, as in `forward 3.2 ms`; empty without one."""
    total = metrics.iteration_ms
    if total is None:
        return ""
    times = {phase: float(metrics.iteration_activity(phase).loc[rank, column]) for phase in ITERATION_PARTS}
    return ", ".join(f"{phase} {ms_text(ms)}" for phase, ms in times.items() if ms > 0.01 * total)


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


@rule("gpu-idle", KERNELS)
def gpu_idle(metrics: JobMetrics) -> Finding | None:
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
    return gpu_idle.finding("The GPU is idle", times.gain(idle), evidence, _ADVICE[ordered[0]])


_LAUNCH_BOUND_MIN_SHARE = 0.05


@rule("launch-bound", KERNELS)
def launch_bound(metrics: JobMetrics) -> Finding | None:
    """Compare the gaps before late launches with the iteration, of the rank that waits most; without iterations, with
    the time from the first to the last activity."""
    times = gpu_time(metrics)
    if times is None:
        return None
    rank, late, total = times.worst(["late_launch"])
    if late < _LAUNCH_BOUND_MIN_SHARE * total:
        return None
    evidence = (
        f"rank {rank}: the GPU waits {ms_text(late)} of {ms_text(total)} ({100 * late / total:.0f} %) for kernels that "
        "the host launches up to 0.1 ms late",
        f"its compute kernels run for {ms_text(float(times.by_rank.loc[rank, 'compute']))}",
    )
    return launch_bound.finding(
        "The host launches kernels more slowly than the GPU runs them",
        times.gain(late),
        evidence,
        'launch fewer, longer kernels: torch.compile (mode="reduce-overhead" uses CUDA graphs), a fused or foreach '
        "optimizer, a larger micro-batch",
    )


_EXPOSED_COMMUNICATION_MIN_SHARE = 0.05


@rule("exposed-communication", KERNELS)
def exposed_communication(metrics: JobMetrics) -> Finding | None:
    """Compare communication without compute with the iteration, of the rank with most of it; without iterations, with
    the time from the first to the last activity."""
    times = gpu_time(metrics)
    if times is None:
        return None
    rank, exposed, total = times.worst(["communication"])
    if exposed < _EXPOSED_COMMUNICATION_MIN_SHARE * total:
        return None
    evidence = [
        f"rank {rank}: collectives run while nothing computes for {ms_text(exposed)} of {ms_text(total)} "
        f"({100 * exposed / total:.0f} %)",
    ]
    if by_phase := phase_times_text(metrics, rank, "cause_communication"):
        evidence.append(f"by the phase in whose time they run: {by_phase}")
    skew = metrics.collective_skew
    if skew is not None:
        waits = {wait.rank: wait.wait_ms for wait in skew.waits}
        evidence.append(
            f"over the whole trace rank {rank} waits {ms_text(waits[rank])} in collectives for ranks that come later"
        )
    return exposed_communication.finding(
        "The GPU waits for communication with other GPUs",
        times.gain(exposed),
        evidence,
        "overlap it with compute (larger DDP buckets or FSDP prefetch, a stream of its own), send fewer bytes (bf16 "
        "gradients, accumulation), and even out the ranks' work if they wait for each other",
    )
