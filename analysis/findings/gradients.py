"""Gradients that go down to the host while the backward waits."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.substeps.aggregate import SubStep
from ebbtide.analysis.metrics.trace_metrics import CopiesOf, Study, at_most
from ebbtide.units import bytes_text, ms_text, rate_text

# A backward computes two forwards' worth; recomputing adds one; reducing gradients over ranks about as much as
# gathering parameters adds to a forward, so one more at most. Published runs with asynchronous copies took 3.8 to 4.7
# forwards with both.
_COMPUTE = 2
# Below this many times what it should take, a backward is not called held up.
_LEAST_RATIO = 1.5
# Pageable copies that take less than this share of the backward are not its gradients.
_LEAST_SHARE = 0.02
_RULE = "blocking-gradients"
_TITLE = "The backward waits while gradients are copied to the host"
_ADVICE = (
    "copy gradients to the host asynchronously, overlapped with the backward (DeepSpeed does so by default from "
    "0.19.5; it needs pinned host buffers)"
)


def blocking_gradients(study: Study) -> Finding | None:
    """Gradients copied to the host so that the backward waits for them: seen as the time that DeepSpeed's own copying
    keeps the host, as pageable copies where each copy was recorded, or as a backward far longer than its forward allows
    while the link is mostly idle."""
    forward, backward = study.ms("forward"), study.ms("backward")
    if not forward or not backward or study.offloaded is False:
        return None
    step = study.sub_step("gradient down")
    if step is not None:
        return _by_sub_step(step, backward)
    down = study.phase_link("backward", "d2h")
    if study.offloaded is None and (down is None or study.params is None or (down.bytes or 0) < study.params):
        return None
    pageable = study.copies_of("d2h", "pageable", "backward") if study.has_copies else None
    if pageable is not None and pageable.busy_ms >= _LEAST_SHARE * backward:
        return _by_copies(pageable, backward)
    share = down.share_of_peak if down is not None else None
    forwards = _COMPUTE + (study.checkpointing is not False) + (study.world_size > 1)
    expected = forwards * forward
    if down is not None and down.bytes is not None and study.peak_bytes_per_s:
        expected = max(expected, down.bytes / study.peak_bytes_per_s * 1e3)
    if backward < _LEAST_RATIO * expected:
        return None
    evidence = [
        f"backward takes {ms_text(backward)}, {backward / forward:.1f} times the forward's {ms_text(forward)}; "
        f"compute, recomputation and reduction explain about {forwards} times",
    ]
    if down is not None and down.mean_bytes_per_s is not None:
        of_peak = f", {100 * share:.0f} % of the link's peak" if share is not None else ""
        evidence.append(
            f"meanwhile {bytes_text(down.bytes)} go down to the host at {rate_text(down.mean_bytes_per_s)}{of_peak}"
        )
    offload = study.zero.get("offload_optimizer")
    if isinstance(offload, dict):
        evidence.append("the DeepSpeed configuration offloads the optimizer to the " + str(offload.get("device")))
    return Finding(_RULE, _TITLE, at_most(backward - expected), tuple(evidence), _ADVICE)


def _by_sub_step(step: SubStep, backward: float) -> Finding | None:
    """The host's own time in copying gradients: where it is long, the copies are waited for."""
    if step.median_ms < _LEAST_SHARE * backward:
        return None
    evidence = [
        f"`gradient down` keeps the host for {ms_text(step.median_ms)} of the backward's {ms_text(backward)}, "
        f"{step.count:,.0f} times for {bytes_text(step.bytes)}",
    ]
    if step.d2h.pageable_share:
        evidence.append(f"a pageable copy runs for {100 * step.d2h.pageable_share:.0f} % of that time")
    return Finding(_RULE, _TITLE, at_most(step.median_ms), tuple(evidence), _ADVICE)


def _by_copies(found: CopiesOf, backward: float) -> Finding:
    evidence = (
        f"{found.count:,} pageable copies of gradients per iteration in the backward, {bytes_text(found.bytes)}, "
        f"{ms_text(found.busy_ms)} of its {ms_text(backward)}",
        "a copy into pageable memory does not return before it is done, and nothing is launched meanwhile",
    )
    return Finding(_RULE, _TITLE, at_most(found.busy_ms), evidence, _ADVICE)
