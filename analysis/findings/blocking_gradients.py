"""Finds a backward that waits while gradients are copied to the host."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.gradient_wait import GradientWait, gradient_wait
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.trace_metrics import CopyStats, TraceMetrics
from ebbtide.phases import BACKWARD, FORWARD
from ebbtide.units import bytes_text, ms_text, rate_text


def check(metrics: TraceMetrics) -> Finding | None:
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
    return Finding(
        "blocking-gradients",
        "The backward waits while gradients are copied to the host",
        clamp_gain(wait.wait_ms),
        tuple(evidence),
        "copy gradients to the host asynchronously, overlapped with the backward (DeepSpeed does so by default from "
        "0.19.5; it needs pinned host buffers)",
    )


def _step_evidence(step: SubStep, backward: float) -> list[str]:
    evidence = [
        f"`gradient down` keeps the host for {ms_text(step.median_ms)} of the backward's {ms_text(backward)}, "
        f"{step.count:,.0f} times for {bytes_text(step.bytes)}",
    ]
    if step.d2h.pageable_share:
        evidence.append(f"a pageable copy runs for {100 * step.d2h.pageable_share:.0f} % of that time")
    return evidence


def _copy_evidence(copies: CopyStats, backward: float) -> list[str]:
    return [
        f"{copies.count:,} pageable copies of gradients per iteration in the backward, {bytes_text(copies.bytes)}, "
        f"{ms_text(copies.busy_ms)} of its {ms_text(backward)}",
        "a copy into pageable memory does not return before it is done, and nothing is launched meanwhile",
    ]


def _duration_evidence(metrics: TraceMetrics, wait: GradientWait, backward: float) -> list[str]:
    forward = metrics.phase_ms(FORWARD) or 0.0
    evidence = [
        f"backward takes {ms_text(backward)}, {backward / forward:.1f} times the forward's {ms_text(forward)}; "
        f"compute, recomputation and reduction explain about {wait.explained_forwards} times",
    ]
    down = metrics.phase_link(BACKWARD, "d2h")
    if down is not None and down.mean_bytes_per_s is not None:
        share = down.share_of_peak
        of_peak = f", {100 * share:.0f} % of the link's peak" if share is not None else ""
        evidence.append(
            f"meanwhile {bytes_text(down.bytes)} go down to the host at {rate_text(down.mean_bytes_per_s)}{of_peak}"
        )
    offload = metrics.zero.get("offload_optimizer")
    if isinstance(offload, dict):
        evidence.append("the DeepSpeed configuration offloads the optimizer to the " + str(offload.get("device")))
    return evidence
