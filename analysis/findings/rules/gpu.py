"""Rules on the time and the clocks of the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, ITERATIONS, KERNELS
from ebbtide.analysis.findings.rule import Need, rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.gpu_state import GpuFigure


class LostTime(NamedTuple):
    """Time that the GPU of a rank loses by some causes in the median iteration, or in a
    trace without iterations."""

    rank: int  # The rank on which it has the largest share.
    ms: float
    total_ms: float  # The iteration, or the time from the first to the last activity.
    # Milliseconds of the rank: `compute`, and `cause_` with each cause.
    times: Mapping[str, float]
    gain_ms: float | None  # What an iteration would gain; None without iterations.

    @property
    def text(self) -> str:
        """The time beside the total."""
        return (
            f"{ms_text(self.ms)} of {ms_text(self.total_ms)} "
            f"({100 * self.ms / self.total_ms:.0f} %)"
        )


def lost_time(
    metrics: JobMetrics, causes: Iterable[str], min_share: float
) -> LostTime | None:
    """Return the time of some causes without compute.

    Return None if it is less than a share of the total, or not known.
    """
    iteration = metrics.iteration_ms
    table = (
        metrics.iteration_activity().assign(total=iteration)
        if iteration is not None
        else _whole_trace(metrics)
    )
    if table.empty or iteration == 0:
        return None
    times = table[[f"cause_{cause}" for cause in causes]].sum(axis=1)
    rank = int((times / table["total"]).idxmax())
    lost, total = float(times[rank]), float(table.loc[rank, "total"])
    if lost < min_share * total:
        return None
    return LostTime(
        rank,
        lost,
        total,
        table.loc[rank].to_dict(),
        None if iteration is None else clamp_gain(lost),
    )


def _whole_trace(metrics: JobMetrics) -> pd.DataFrame:
    """Return the times of each rank with recorded kernels.

    The trace has no iterations.
    """
    rows = {}
    for rank in metrics.by_rank:
        activity = rank.activity
        if activity.total.span_ms:
            causes = {
                f"cause_{cause}": ms for cause, ms in activity.without_compute.items()
            }
            rows[rank.rank] = {
                "total": activity.total.span_ms,
                "compute": activity.total.compute_ms,
                **causes,
            }
    return pd.DataFrame.from_dict(rows, orient="index")


def phase_times_text(metrics: JobMetrics, rank: int, column: str) -> str:
    """Return the time of a column of `phase_activity` in each phase.

    An example is `forward 3.2 ms`; it is empty without such a time.
    """
    total = metrics.iteration_ms
    if total is None:
        return ""
    times = {
        phase: float(metrics.iteration_activity(phase).loc[rank, column])
        for phase in ITERATION_PARTS
    }
    return ", ".join(
        f"{phase} {ms_text(ms)}" for phase, ms in times.items() if ms > 0.01 * total
    )


# Every job has gaps between kernels. More than this share of the iteration is much.
_MIN_SHARE = 0.1
# The causes that this rule reports; `launch_bound` reports late launches.
_CAUSES = {
    "host_busy": "the host launched nothing for over 0.1 ms",
    "launch_call": "the call that launched the next work took over 0.1 ms itself",
    "queue": "the next work was launched, but had not begun",
    "unknown": "the launch of the next work was not recorded",
}
_ADVICE = {
    "host_busy": (
        "find out what the host does then: loading data, logging, the optimizer on the "
        "CPU, or calls that "
        "wait for the GPU, such as loss.item()"
    ),
    "launch_call": (
        "find out why launching calls take long: modules that are loaded at their "
        "first use (CUDA_MODULE_LOADING=EAGER loads them at the start), a full queue, "
        "or page faults of the host"
    ),
    "queue": (
        "look for dependencies between streams, and for other processes on the GPU"
    ),
    "unknown": (
        "record the calls that launch kernels too: torch.profiler with "
        "ProfilerActivity.CPU"
    ),
}


@rule("gpu-idle", KERNELS)
def gpu_idle(metrics: JobMetrics) -> Finding | None:
    """Compare the time in which nothing runs on the GPU with the iteration, of the rank
    that is idle most; without iterations, with the time from the first to the last
    activity."""
    idle = lost_time(metrics, _CAUSES, _MIN_SHARE)
    if idle is None:
        return None
    causes = {cause: idle.times[f"cause_{cause}"] for cause in _CAUSES}
    ordered = sorted(causes, key=lambda cause: -causes[cause])
    evidence = [
        f"rank {idle.rank}: nothing runs on the GPU for {idle.text}, late launches of "
        "up to 0.1 ms not included",
        *(
            f"{ms_text(causes[cause])}: {_CAUSES[cause]}"
            for cause in ordered
            if causes[cause] > 0.01 * idle.total_ms
        ),
    ]
    if by_phase := phase_times_text(metrics, idle.rank, "idle"):
        evidence.append(f"all idle time by phase: {by_phase}")
    return gpu_idle.finding(
        "The GPU is idle", idle.gain_ms, evidence, _ADVICE[ordered[0]]
    )


# Of late launches, and of communication without compute.
_MIN_LOST_SHARE = 0.05


@rule("launch-bound", KERNELS)
def launch_bound(metrics: JobMetrics) -> Finding | None:
    """Compare the gaps before late launches with the iteration, of the rank that waits
    most; without iterations, with the time from the first to the last activity."""
    late = lost_time(metrics, ["late_launch"], _MIN_LOST_SHARE)
    if late is None:
        return None
    evidence = (
        f"rank {late.rank}: the GPU waits {late.text} for kernels that the host "
        "launches up to 0.1 ms late",
        f"its compute kernels run for {ms_text(late.times['compute'])}",
    )
    return launch_bound.finding(
        "The host launches kernels more slowly than the GPU runs them",
        late.gain_ms,
        evidence,
        'launch fewer, longer kernels: torch.compile (mode="reduce-overhead" uses CUDA '
        "graphs), a fused or foreach "
        "optimizer, a larger micro-batch",
    )


@rule("exposed-communication", KERNELS)
def exposed_communication(metrics: JobMetrics) -> Finding | None:
    """Compare communication without compute with the iteration, of the rank with most
    of it; without iterations, with the time from the first to the last activity."""
    exposed = lost_time(metrics, ["communication"], _MIN_LOST_SHARE)
    if exposed is None:
        return None
    evidence = [
        f"rank {exposed.rank}: collectives run while nothing computes for "
        f"{exposed.text}"
    ]
    if by_phase := phase_times_text(metrics, exposed.rank, "cause_communication"):
        evidence.append(f"by the phase in whose time they run: {by_phase}")
    if (skew := metrics.collective_skew) is not None:
        wait = next(wait for wait in skew.waits if wait.rank == exposed.rank)
        evidence.append(
            f"over the whole trace rank {wait.rank} waits {ms_text(wait.wait_ms)} in "
            "collectives for ranks that come "
            "later"
        )
    return exposed_communication.finding(
        "The GPU waits for communication with other GPUs",
        exposed.gain_ms,
        evidence,
        "overlap it with compute (larger DDP buckets or FSDP prefetch, a stream of its "
        "own), send fewer bytes (bf16 "
        "gradients, accumulation), and even out the ranks' work if they wait for each "
        "other",
    )


THROTTLE_REASONS = Need(
    "SM clocks and throttle reasons of the GPU in the iterations (`ebbtide profile` "
    "records them)",
    lambda metrics: (
        {"sm_clock", "throttled"}
        <= {figure.quantity for figure in metrics.gpu().figures}
    ),
)
# Smaller shares, of time or of clocks, are normal: busy cards reach their power limit
# now and then.
_MIN_THROTTLED_SHARE = 0.1
_MIN_CLOCK_LOSS = 0.05
_ADVICE_ON_POWER = (
    "compare the power limit with the card's default (nvidia-smi -q -d POWER)"
)
_ADVICE_ON_HEAT = "check temperature, fans and airflow (nvidia-smi -q -d TEMPERATURE)"


@rule("throttled-clocks", GPU, ITERATIONS, THROTTLE_REASONS)
def throttled_clocks(metrics: JobMetrics) -> Finding | None:
    """Compare the time with lowered clocks with the iteration, of the rank that loses
    most: of each phase its throttled share, times what its mean clock is below the
    rank's highest one."""
    iteration = metrics.iteration_ms
    if iteration is None:
        return None
    losses = {rank: _loss(metrics, rank) for rank in metrics.trace.ranks}
    rank = max(losses, key=lambda number: losses[number])
    lost, throttled = losses[rank]
    if (
        throttled < _MIN_THROTTLED_SHARE * iteration
        or lost < _MIN_CLOCK_LOSS * throttled
    ):
        return None
    reasons = _reasons(metrics, rank)
    evidence = [
        f"rank {rank}: a power or thermal limit lowers the clocks for "
        f"{ms_text(throttled)} of {ms_text(iteration)} "
        f"({100 * throttled / iteration:.0f} %), by {100 * lost / throttled:.0f} % "
        "below the highest SM clock on "
        "average",
        *(
            f"{name}: {100 * share:.0f} % of the samples"
            for name, share in reasons.items()
        ),
    ]
    has_heat = any("thermal" in name for name in reasons)
    has_power = any("power" in name for name in reasons)
    advice = [
        text
        for text, given in ((_ADVICE_ON_HEAT, has_heat), (_ADVICE_ON_POWER, has_power))
        if given
    ]
    return throttled_clocks.finding(
        "A power or thermal limit lowers the GPU's clocks",
        clamp_gain(lost),
        evidence,
        "; ".join(advice) or "ask for the reason: nvidia-smi -q -d PERFORMANCE",
    )


def _loss(metrics: JobMetrics, rank: int) -> tuple[float, float]:
    """Return the ms that an iteration loses by lowered clocks, and the ms in which they
    are lowered."""
    by_quantity: dict[str, dict[str, GpuFigure]] = {}
    for figure in metrics.gpu([rank]).figures:
        by_quantity.setdefault(figure.quantity, {})[figure.phase or ""] = figure
    clocks = by_quantity.get("sm_clock", {})
    highest = max((figure.max for figure in clocks.values()), default=0.0)
    lost = throttled = 0.0
    for phase, figure in by_quantity.get("throttled", {}).items():
        if phase in clocks and highest > 0:
            milliseconds = (metrics.phase_ms(phase) or 0.0) * figure.mean / 100
            throttled += milliseconds
            lost += milliseconds * (1 - clocks[phase].mean / highest)
    return lost, throttled


def _reasons(metrics: JobMetrics, rank: int) -> Mapping[str, float]:
    """Return the share of the steady iterations' samples in which each limit was
    reached."""
    from ebbtide.analysis.metrics.gpu_state import LIMITS
    from ebbtide.analysis.metrics.iterations import intervals

    spans = intervals(metrics.trace, rank).spans
    spans = spans[spans["iteration"].isin(metrics.steady_iterations)]
    rows = metrics.trace.gpu(rank)
    own = rows["t_ns"].between(spans["start_ns"].min(), spans["end_ns"].max())
    own &= (rows["device"] == metrics.rank(rank).device.device) & rows[
        "throttle_reasons"
    ].notna()
    bits = rows.loc[own, "throttle_reasons"].astype("int64")
    shares = {name: float((bits & bit != 0).mean()) for bit, name in LIMITS.items()}
    return {name: share for name, share in shares.items() if share > 0}
