"""Rules on iterations, and on ranks that differ."""

from collections.abc import Callable

import numpy as np

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import ENOUGH_VALUES, ITERATIONS, PASSES, RANKS
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.drift import Drift
from ebbtide.analysis.metrics.iteration_mean import repeated
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.ranks.comparison import RankDifference
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.phases import OTHER, PHASES
from ebbtide.units import bytes_text, ms_text, rate_text, runs_text


@rule("phases")
def phases(metrics: JobMetrics) -> Unknown | None:
    """Return what to record where the trace has no finished iteration."""
    if metrics.iteration_ms is not None:
        return None
    return phases.unknown(
        "which phases does an iteration have, and how long are they?",
        "record the job with `ebbtide profile`, or import its log or its profiler's "
        "trace with `ebbtide import`",
    )


# Causes of time without compute that lie with the host, or with its copies.
_WAITING = [
    f"cause_{cause}"
    for cause in (
        "copy",
        "memset",
        "late_launch",
        "host_busy",
        "launch_call",
        "queue",
        "unknown",
    )
]
# Every job does something between the phases. More than this share of the iteration is
# much.
_MIN_OTHER_SHARE = 0.15
_AROUND_FORWARDS = (
    "look at what runs around the forwards without gradients (sampling of tokens, "
    "rewards, metrics); "
)


@rule("between-phases", ITERATIONS, PASSES)
def between_phases(metrics: JobMetrics) -> Finding | None:
    """Compare the time outside phases with the iteration, without the time of forwards
    without gradients. Where kernels were recorded, also without the time in which the
    GPU computes or communicates: it does not wait for the host then. Time of copies is
    left to `copies-around-step`.
    """
    other, iteration = metrics.phase_ms(OTHER) or 0.0, metrics.iteration_ms
    if not iteration:
        return None
    named = min(metrics.without_gradients_ms or 0.0, other)
    unnamed, least = other - named, _MIN_OTHER_SHARE * iteration
    activity = metrics.iteration_activity(OTHER)
    if len(activity):
        unnamed = min(unnamed, float(activity[_WAITING].sum(axis=1).max()))
    copies = [metrics.copy_ms(*both) for both in metrics.both_directions(OTHER)]
    if max(copies, default=0.0) >= least:
        unnamed = max(0.0, unnamed - max(copies))
    part = (
        f"{ms_text(named)} of {ms_text(iteration)} ({100 * named / iteration:.0f} %) "
        "are forwards without gradients"
    )
    if unnamed >= least:
        busy = (
            ", and the GPU neither computes nor communicates then"
            if len(activity)
            else ""
        )
        share = (
            f"{ms_text(unnamed)} of {ms_text(iteration)} "
            f"({100 * unnamed / iteration:.0f} %) belong to no phase"
        )
        return between_phases.finding(
            "Much of the iteration is outside forward, backward and update",
            clamp_gain(unnamed),
            (share + busy, *([f"besides, {part}"] if named else [])),
            (_AROUND_FORWARDS if named > unnamed else "")
            + "look at data loading (workers, pinned batches), logging, and synchronising calls such as loss.item()",
        )
    if named < least:
        return _stalls(metrics)
    return between_phases.finding(
        f"Forwards without gradients take {100 * named / iteration:.0f} % of the "
        "iteration",
        None,
        (part,),
        "reference models, generation and evaluation are work of the job: `ebbtide "
        "summary --by substep` has their "
        "times; where outputs of a frozen model do not change between epochs, compute "
        "them once",
    )


# An iteration stalls if its `other` is longer than the median by this share of a median
# iteration. So many stalls are no chance, and together they are to cost this share of
# all time.
_STALL_SHARE = 0.5
_MIN_STALLS = 3
_MIN_LOST_SHARE = 0.05


def _stalls(metrics: JobMetrics) -> Finding | None:
    """Report iterations with much more time outside phases than others, on the rank
    that loses most by them. What the job repeats is no stall."""
    if repeated(metrics.trace) is not None:
        return None
    lost: list[tuple[float, int, float, int]] = []
    for rank in metrics.by_rank:
        times, other = (
            rank.series.columns[name] for name in ("iteration_ms", "other_ms")
        )
        usual = median_or_none(times) or 0.0
        excess = np.minimum(times - usual, other - (median_or_none(other) or 0.0))
        longer = excess[excess > _STALL_SHARE * usual]
        if len(longer) >= _MIN_STALLS and longer.sum() >= _MIN_LOST_SHARE * np.nansum(
            times
        ):
            lost.append(
                (float(longer.sum()), len(longer), float(np.nansum(times)), len(times))
            )
    if not lost:
        return None
    stalled, count, total, iterations = max(lost)
    return between_phases.finding(
        "Some iterations stall outside forward, backward and update",
        stalled / iterations,
        (
            f"{count} of {iterations} iterations take {ms_text(stalled / count)} "
            "longer than the median outside phases",
            f"that is {100 * stalled / total:.0f} % of all time; medians do not show "
            "it",
        ),
        "look at what runs now and then: checkpoints, evaluation, logging, a data "
        "loader that runs dry (workers, "
        "prefetch_factor), Python's garbage collector",
    )


# A rank that is slowest in at least this share of the iterations is not so by chance.
_MIN_SLOWEST_SHARE = 0.8
_MIN_SLOWER = 0.02
_MIN_ITERATIONS = 3
# More ranks are in the table of `ebbtide summary`.
_MAX_LINES = 8
_ADVICE = {
    "slow link": (
        "check lanes and generation of the link (nvidia-smi -q), the switch it "
        "shares, and the kernel log"
    ),
    "slow clock": (
        "check power limit, temperature and fans (nvidia-smi -q -d PERFORMANCE)"
    ),
    "less free memory": (
        "look for other processes on that GPU, and for state or buffers that only "
        "this rank holds"
    ),
}
_ADVICE_ON_TIME = (
    "look at that rank's clocks, temperature, link width, CPU binding and share of the "
    "work"
)
_ADVICE_ON_DELAY = (
    "look at what that rank does before the phase: data loading, logging, host work"
)


@rule("slow-rank", ITERATIONS, RANKS)
def slow_rank(metrics: JobMetrics) -> Finding | None:
    """List the ranks and hosts of `rank_differences` with their causes; the gain is
    in the longest phases. Where none of a few ranks stands out, see
    `_slowest_rank`."""
    differences = metrics.rank_differences.differences
    if not differences:
        return _slowest_rank(metrics)
    evidence = [*map(_evidence, differences[:_MAX_LINES])]
    if len(differences) > _MAX_LINES:
        evidence.append(
            f"{len(differences) - _MAX_LINES} more: `ebbtide summary` lists them"
        )
    causes = [difference.cause for difference in differences]
    advice = [
        _ADVICE_ON_DELAY if "late " in cause else _ADVICE.get(cause, _ADVICE_ON_TIME)
        for cause in causes
    ]
    gain = max(difference.extra_ms for difference in differences)
    return slow_rank.finding(
        _title(differences),
        clamp_gain(gain) if gain > 0 else None,
        evidence,
        "; ".join(dict.fromkeys(advice)),
    )


def _slowest_rank(metrics: JobMetrics) -> Finding | None:
    """Compare the phase times of the rank that is slowest most often with the median of
    the others."""
    stats = metrics.iterations([])
    if not stats.slowest_rank or stats.counted < _MIN_ITERATIONS:
        return None
    rank, count = max(stats.slowest_rank.items(), key=lambda item: item[1])
    busy = {
        rank: sum(
            median_or_none(metrics.rank(rank).series.columns[f"{phase}_ms"]) or 0.0
            for phase in PHASES
        )
        for rank in stats.slowest_rank
    }
    own = busy.pop(rank)
    usual = sorted(busy.values())[len(busy) // 2]
    if (
        count < _MIN_SLOWEST_SHARE * stats.counted
        or not usual
        or own - usual < _MIN_SLOWER * usual
    ):
        return None
    return slow_rank.finding(
        f"Rank {rank} is slower than the others",
        clamp_gain(own - usual),
        (
            f"rank {rank} is the slowest in {count} of {stats.counted} iterations",
            f"its phases take {ms_text(own)}, those of the median other rank "
            f"{ms_text(usual)}",
        ),
        _ADVICE_ON_TIME,
    )


def _title(differences: tuple[RankDifference, ...]) -> str:
    if len(differences) == 1:
        name = differences[0].name
        return (
            f"{name[0].upper()}{name[1:]} differs from the others: "
            f"{differences[0].cause}"
        )
    hosts = sum(difference.is_host for difference in differences)
    ranks = len(differences) - hosts
    parts = [
        f"{count} {kind}{'s' if count > 1 else ''}"
        for count, kind in ((hosts, "host"), (ranks, "rank"))
        if count
    ]
    return f"{' and '.join(parts)} differ from the others"


def _evidence(difference: RankDifference) -> str:
    where = f" ({runs_text(difference.ranks)})" if difference.is_host else ""
    where = (
        f" on {difference.host}"
        if difference.host and not difference.is_host
        else where
    )
    details = [
        *(deviation.text for deviation in difference.deviations),
        *difference.facts,
    ]
    return f"{difference.name}{where}: {difference.cause}: {'; '.join(details)}"


_TITLES = {
    "iteration_time": "Iterations become slower during the run",
    "link_speed": "The link becomes slower during the run",
    "copy_rate": "Copies become slower during the run",
    "sm_clock": "The GPU's clock falls during the run",
    "free_memory": "Free memory shrinks during the run",
    "rss": "Host memory grows during the run",
    "pinned": "Pinned memory grows during the run",
    "cgroup": "Host memory of the control group grows during the run",
}
_TEXTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "iteration_time": (
        "an iteration takes {after}, {before} at the beginning",
        ms_text,
    ),
    "link_speed": (
        "the link under load can carry {after} per direction, {before} at the "
        "beginning",
        rate_text,
    ),
    "copy_rate": (
        "copies of 1 MiB or more run at {after}, {before} at the beginning",
        rate_text,
    ),
    "sm_clock": (
        "the SM clock of the busy GPU is {after}, {before} at the beginning",
        lambda megahertz: f"{megahertz:,.0f} MHz",
    ),
    "free_memory": (
        "the least free memory of an iteration is {after}, {before} at the beginning",
        bytes_text,
    ),
    "rss": (
        "the process has {after} of host memory, {before} at the beginning",
        bytes_text,
    ),
    "pinned": ("{after} are pinned, {before} at the beginning", bytes_text),
    "cgroup": (
        "the control group has {after} of host memory, {before} at the beginning",
        bytes_text,
    ),
}
_DRIFT_ADVICE = {
    "iteration_time": (
        "look for what else changes with time on that host: other jobs, sequence "
        "lengths, data loading, "
        "logs and caches that grow"
    ),
    "link_speed": (
        "check the card's seat, riser and the kernel log (AER errors): a link falls "
        "back to a lower "
        "generation or fewer lanes after errors"
    ),
    "copy_rate": (
        "look for other traffic on the link and in host memory, and for memory that "
        "is no longer pinned"
    ),
    "sm_clock": (
        "check power limit, temperature and fans (nvidia-smi -q -d PERFORMANCE)"
    ),
    "free_memory": (
        "look for tensors that are kept, such as losses that are summed with their "
        "graph; a memory snapshot "
        "shows who holds them"
    ),
    "rss": (
        "look for lists that keep tensors, losses or samples on the host; files that "
        "are mapped count, too, but the kernel takes them back"
    ),
    "pinned": (
        "look for pinned buffers of sizes that change, and for tensors on the host "
        "that are kept"
    ),
    "cgroup": (
        "the process itself does not grow: look at workers of data loaders "
        "(persistent_workers, copies of Python objects) and at /dev/shm"
    ),
}


@rule("drift", ENOUGH_VALUES)
def drift(metrics: JobMetrics) -> Finding | None:
    """Report each quantity that drifts. Only the iteration time has a gain."""
    drifts = metrics.drifts
    if not drifts:
        return None
    slower = [drift for drift in drifts if drift.quantity == "iteration_time"]
    causes = [drift for drift in drifts if drift.quantity != "iteration_time"]
    return drift.finding(
        _TITLES[drifts[0].quantity],
        clamp_gain(slower[0].mean_change) if slower else None,
        tuple(_drift_evidence(drift) for drift in drifts),
        "; ".join(_DRIFT_ADVICE[drift.quantity] for drift in causes or drifts),
    )


def _drift_evidence(drift: Drift) -> str:
    text, unit = _TEXTS[drift.quantity]
    rank = "" if drift.rank is None else f"rank {drift.rank}: "
    percent = (
        f" ({100 * (drift.after / drift.before - 1):+.0f} %)" if drift.before else ""
    )
    moment = (
        f"iteration {drift.first:.0f}"
        if drift.counts_iterations
        else f"{ms_text(drift.first)} after the start"
    )
    how = (
        f"; it changes steadily, from about {moment} on"
        if drift.is_gradual
        else f"; since {moment}"
    )
    return (
        rank
        + text.format(after=unit(drift.after), before=unit(drift.before))
        + percent
        + how
    )
