"""Rules on the transfers of gradients to the host in the backward."""

from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.findings.needs import (
    ITERATIONS,
    MAYBE_OFFLOADED,
    MIN_SHARE,
    OFFLOADED,
)
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.gradient_wait import GradientWait, gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import CopyStats
from ebbtide.analysis.metrics.substeps.breakdown import SubStep
from ebbtide.features.deepspeed.findings.needs import DEEPSPEED, ENABLE_ENGINE, setup_of
from ebbtide.phases import BACKWARD, FORWARD
from ebbtide.state_bytes import GRAD_BYTES
from ebbtide.units import bytes_text, ms_text, rate_text

_MOST_MOVED = " (the rank that moves most)"
# DeepSpeed's ZeRO-3 moves 6 B a parameter down and 2 B up. If more than this many times
# the 2 B needed go down, gradients make that round trip.
_ROUND_TRIP = 1.5


@rule("blocking-gradients", ITERATIONS, MAYBE_OFFLOADED)
def blocking_gradients(metrics: JobMetrics) -> Finding | None:
    """Report the wait that `gradient_wait` measures."""
    wait, backward = gradient_wait(metrics), metrics.phase_ms(BACKWARD)
    if wait is None or backward is None:
        return None
    if wait.step is not None:
        evidence = _step_evidence(wait.step, backward)
    elif wait.copies is not None:
        evidence = _copy_evidence(wait.copies, backward)
    else:
        evidence = _duration_evidence(metrics, wait, backward)
    return blocking_gradients.finding(
        "The backward waits while gradients are copied to the host",
        clamp_gain(wait.wait_ms),
        evidence,
        "copy gradients to the host asynchronously, overlapped with the backward "
        "(DeepSpeed does so by default from "
        "0.19.5; it needs pinned host buffers)",
    )


def _step_evidence(step: SubStep, backward: float) -> list[str]:
    evidence = [
        f"`gradient down` keeps the host for {ms_text(step.median_ms)} of the "
        f"backward's {ms_text(backward)}, "
        f"{step.count:,.0f} times for {bytes_text(step.bytes)}",
    ]
    if step.d2h.pageable_share:
        evidence.append(
            f"a pageable copy runs for {100 * step.d2h.pageable_share:.0f} % of that "
            "time"
        )
    return evidence


def _copy_evidence(copies: CopyStats, backward: float) -> list[str]:
    return [
        f"{copies.count:,} pageable copies of gradients per iteration in the backward, "
        f"{bytes_text(copies.bytes)}, "
        f"{ms_text(copies.busy_ms)} of its {ms_text(backward)}",
        "a copy into pageable memory does not return before it is done, and nothing "
        "is launched meanwhile",
    ]


def _duration_evidence(
    metrics: JobMetrics, wait: GradientWait, backward: float
) -> list[str]:
    forward = metrics.phase_ms(FORWARD) or 0.0
    evidence = [
        f"backward takes {ms_text(backward)}, {backward / forward:.1f} times the "
        f"forward's {ms_text(forward)}; "
        "compute, recomputation and reduction explain about "
        f"{wait.explained_forwards} times",
    ]
    down = metrics.phase_link(BACKWARD, "d2h")
    if down is not None and down.mean_bytes_per_s is not None:
        share = down.share_of_peak
        of_peak = (
            f", {100 * share:.0f} % of the link's peak" if share is not None else ""
        )
        evidence.append(
            f"meanwhile {bytes_text(down.bytes)} go down to the host at "
            f"{rate_text(down.mean_bytes_per_s)}{of_peak}" + _MOST_MOVED
        )
    setup = setup_of(metrics)
    if setup is not None and setup.offloads is not None:
        evidence.append(
            "the DeepSpeed configuration offloads the optimizer to the "
            f"{setup.offload_config.get('device')}"
        )
    return evidence


@rule("gradient-round-trip", ITERATIONS, OFFLOADED, DEEPSPEED)
def gradient_round_trip(metrics: JobMetrics) -> Finding | Unknown | None:
    """Compare the bytes that go down in the backward with one copy of the gradients in
    half precision."""
    job, params, iteration = setup_of(metrics), metrics.params, metrics.iteration_ms
    if (
        job is None
        or job.info.policy
        or job.stage != 3
        or not metrics.offloaded
        or not params
        or not iteration
    ):
        return None
    down, up = metrics.phase_link(BACKWARD, "d2h"), metrics.phase_link(BACKWARD, "h2d")
    if down is None or down.bytes is None:
        return gradient_round_trip.unknown(
            "how often do gradients cross the link? DeepSpeed's ZeRO-3 takes them "
            "down, up and down again",
            "record copies: ebbtide profile --transfers, or counters of the link",
        )
    # Gradients of a resident part go down too: their buffers are on the host for every
    # ratio.
    needed = GRAD_BYTES * params
    if down.bytes < _ROUND_TRIP * needed:
        return None
    # Offloaded parameters go up in the backward too; then none of the bytes up are
    # counted as gradients.
    back = (
        0.0
        if up is None or up.bytes is None or job.zero_config.get("offload_param")
        else min(up.bytes, needed)
    )
    costs = [_part_ms(metrics, down.busy_ms, down.bytes, down.bytes - needed)]
    if back and up is not None and up.bytes:
        costs.append(_part_ms(metrics, up.busy_ms, up.bytes, back))
    recorded = [cost for cost in costs if cost is not None]
    gain = (
        clamp_gain(sum(recorded), metrics.phase_ms(BACKWARD) or iteration)
        if recorded
        else None
    )
    if gain is not None and gain < MIN_SHARE * iteration:
        return None
    evidence = (
        f"in the backward {bytes_text(down.bytes)} go down, {down.bytes / params:.1f} "
        "B a parameter, and "
        f"{bytes_text(up.bytes if up is not None else None)} up{_MOST_MOVED}; one copy "
        "in half precision is "
        f"{bytes_text(needed)}",
        "DeepSpeed's ZeRO-3 takes each gradient down, back up, and down again in fp32",
    )
    return gradient_round_trip.finding(
        "Gradients cross the link more than once",
        gain,
        evidence,
        f"{ENABLE_ENGINE} takes each down once, in half precision",
    )


def _part_ms(
    metrics: JobMetrics, busy_ms: float | None, moved: float, part: float
) -> float | None:
    """Return the time of a part of the moved bytes, by the copies' own time, else at
    the link's peak."""
    if busy_ms is not None:
        return busy_ms * part / moved
    return part / metrics.peak_bytes_per_s * 1e3 if metrics.peak_bytes_per_s else None
