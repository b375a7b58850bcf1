"""Finds passes over host memory that the optimizer's kernel could include: unscaling and converting."""

from __future__ import annotations

from ebbtide.analysis.findings.common import ENABLE_ENGINE
from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import UPDATE
from ebbtide.units import ms_text

# Passes that cost less than this share of an iteration are not reported.
_MIN_SHARE = 0.02


def check(metrics: TraceMetrics) -> Finding | None:
    """Measure DeepSpeed's sub-steps `unscale` and `parameters`, without the copy that `parameters` includes."""
    update, iteration = metrics.sub_step("update"), metrics.iteration_ms
    unscale, parameters = metrics.sub_step("unscale", ("cpu",)), metrics.sub_step("parameters")
    update_ms = metrics.phase_ms(UPDATE)
    if update is None or not update.median_ms or not iteration or not update_ms:
        return None
    unscale_ms = unscale.median_ms if unscale is not None else 0.0
    convert_ms = parameters.median_ms if parameters is not None else 0.0
    saved = unscale_ms + convert_ms
    if metrics.has_gpu and parameters is not None and parameters.bytes and metrics.peak_bytes_per_s:
        # The copy itself remains, at best at the link's peak.
        saved = unscale_ms + clamp_gain(convert_ms - parameters.bytes / metrics.peak_bytes_per_s * 1e3)
    if saved < _MIN_SHARE * iteration:
        return None
    evidence = (
        f"`unscale` takes {ms_text(unscale_ms)} and `parameters` {ms_text(convert_ms)}, in addition to "
        f"{ms_text(update.median_ms)} of the optimizer's kernel on the CPU",
        f"{100 * max(0.0, 1 - update.median_ms / update_ms):.0f} % of the update, {ms_text(update_ms)}, is not that "
        "kernel",
    )
    return Finding(
        "passes-beside-adam",
        "The CPU passes over gradients and parameters again outside the optimizer's kernel",
        clamp_gain(saved),
        evidence,
        f"one pass can unscale, update and write the half-precision parameter: {ENABLE_ENGINE} does",
    )
