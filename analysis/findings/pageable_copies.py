"""Finds copies from or to pageable host memory, which the driver stages through a buffer of its own."""

from __future__ import annotations

from ebbtide.analysis.findings.common import MIN_SHARE, RECORD_COPIES
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text, ms_text, rate_text

_QUESTION = "are copies made from pinned or from pageable memory?"


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare pageable copies with the rate of pinned ones in the same direction, else with the link's peak."""
    if not metrics.has_gpu or not metrics.iteration_ms:
        return None
    if not metrics.has_copies:
        return Unknown("pageable-copies", _QUESTION, RECORD_COPIES)
    if len(metrics.steady_copies) and metrics.steady_copies["host_memory"].isna().all():
        record = "the copies of this trace do not state their kind of memory: " + RECORD_COPIES
        return Unknown("pageable-copies", _QUESTION, record)
    gains: list[float] = []
    cost = 0.0
    evidence = []
    for direction in DIRECTIONS:
        pageable, pinned = (metrics.copy_stats(direction, kind) for kind in ("pageable", "pinned"))
        if pageable is None or pageable.bytes is None or pageable.busy_ms <= 0:
            continue
        rate = pageable.bytes / pageable.busy_ms * 1e3
        fast = pinned.bytes / pinned.busy_ms * 1e3 if pinned and pinned.bytes and pinned.busy_ms else None
        fast = fast if fast is not None and fast > rate else metrics.peak_bytes_per_s
        if fast is not None:
            gains.append(clamp_gain(pageable.busy_ms * (1 - rate / fast)))
        cost += gains[-1] if fast is not None else pageable.busy_ms
        comparison = f"; pinned ones could run at {rate_text(fast)}" if fast is not None and fast > rate else ""
        evidence.append(
            f"{direction}: {pageable.count:,} pageable copies per iteration, {bytes_text(pageable.bytes)} in "
            f"{ms_text(pageable.busy_ms)} ({rate_text(rate)}{comparison})"
        )
    if not evidence or cost < MIN_SHARE * metrics.iteration_ms:
        return None
    return Finding(
        "pageable-copies",
        "Copies go through pageable host memory",
        clamp_gain(sum(gains)) if gains else None,
        tuple(evidence),
        "keep what is copied in pinned memory (pin_memory=True, offload_optimizer.pin_memory)",
    )
