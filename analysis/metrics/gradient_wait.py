"""Measures how long the backward waits while gradients are copied to host memory."""

from dataclasses import dataclass

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import CopyStats
from ebbtide.analysis.metrics.substeps.breakdown import SubStep
from ebbtide.phases import BACKWARD, FORWARD

# A backward computes as much as two forwards. Recomputation adds one. Reducing
# gradients over ranks takes about as long as gathering parameters adds to a forward, so
# at most one more. Published runs with asynchronous copies took 3.5 to 4.7 forwards
# with both from 13 G parameters on, and 2.0 to 3.2 below, where forwards are not
# limited by arithmetic.
_FORWARDS_PER_BACKWARD = 2
# A backward that takes less than this many times its expected time does not count as
# waiting.
_MIN_RATIO = 1.5
# Pageable copies that take less than this share of the backward are not the gradients.
_MIN_SHARE = 0.02


@dataclass(frozen=True)
class GradientWait:
    """Time for which the backward waits for gradient copies, and its data.

    The data is what the time was computed from.
    """

    wait_ms: float  # Milliseconds per iteration, on the slowest rank.
    # DeepSpeed's sub-step `gradient down`, if that gives the time.
    step: SubStep | None = None
    # The pageable copies of gradients, if they give the time.
    copies: CopyStats | None = None
    # Where neither was recorded: how many forwards' time compute, recomputation and
    # reduction explain; the wait is the backward minus that time, or minus the time of
    # the bytes at the link's peak.
    explained_forwards: int | None = None


def gradient_wait(metrics: JobMetrics) -> GradientWait | None:
    """Measure the wait for gradient copies; None without a wait, offloaded state or
    phases.

    It is DeepSpeed's sub-step, else pageable copies, else the part of a backward that
    is far longer than its forward explains while the link is mostly idle."""
    forward, backward = metrics.phase_ms(FORWARD), metrics.phase_ms(BACKWARD)
    if not forward or not backward or metrics.offloaded is False:
        return None
    step = metrics.sub_step("gradient down")
    if step is not None:
        # The host's own time for copying gradients: if it is long, the host waits for
        # the copies.
        return (
            GradientWait(step.median_ms, step=step)
            if step.median_ms >= _MIN_SHARE * backward
            else None
        )
    down = metrics.phase_link(BACKWARD, "d2h")
    if metrics.offloaded is None and (
        down is None or metrics.params is None or (down.bytes or 0) < metrics.params
    ):
        return None
    pageable = (
        metrics.copy_stats("d2h", "pageable", BACKWARD) if metrics.has_copies else None
    )
    if pageable is not None and pageable.busy_ms >= _MIN_SHARE * backward:
        return GradientWait(pageable.busy_ms, copies=pageable)
    forwards = (
        _FORWARDS_PER_BACKWARD
        + (metrics.checkpointing is not False)
        + (metrics.world_size > 1)
    )
    expected = forwards * forward
    if down is not None and down.bytes is not None and metrics.peak_bytes_per_s:
        expected = max(expected, down.bytes / metrics.peak_bytes_per_s * 1e3)
    if backward < _MIN_RATIO * expected:
        return None
    return GradientWait(backward - expected, explained_forwards=forwards)
