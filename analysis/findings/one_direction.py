"""Finds phases in which copies of the two directions take turns, although the link carries both at once."""

from __future__ import annotations

from ebbtide.analysis.findings.common import MIN_SHARE, RECORD_COPIES
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import ms_text


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the overlap of the two directions with the largest possible, of the rank where they differ most."""
    if not metrics.has_gpu or not metrics.iteration_ms:
        return None
    if not metrics.has_copies:
        return Unknown("one-direction", "do copies of both directions run at once or take turns?", RECORD_COPIES)
    total = 0.0
    evidence = []
    for phase in ITERATION_PARTS:
        busy = [
            (pair.h2d.busy_ms, pair.d2h.busy_ms, pair.h2d.both_ms)
            for pair in metrics.both_directions(phase)
            if pair.h2d.busy_ms is not None and pair.d2h.busy_ms is not None and pair.h2d.both_ms is not None
        ]
        h2d, d2h, both = max(busy, key=lambda ms: min(ms[:2]) - ms[2], default=(0.0, 0.0, 0.0))
        gain = min(h2d, d2h) - both
        if gain >= MIN_SHARE * metrics.iteration_ms:
            total += gain
            evidence.append(f"{phase}: h2d busy {ms_text(h2d)}, d2h busy {ms_text(d2h)}, both at once {ms_text(both)}")
    if not evidence:
        return None
    return Finding(
        "one-direction",
        "Copies of the two directions take turns",
        clamp_gain(total),
        tuple(evidence),
        "put h2d and d2h copies on streams of their own, so that they overlap",
    )
