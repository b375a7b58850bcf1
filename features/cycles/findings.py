"""Rule on state that is moved around the iterations."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.findings.needs import ITERATIONS
from ebbtide.analysis.findings.rule import Need, rule
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.cycles.changes import advise
from ebbtide.features.cycles.cycles import slowest_cycles
from ebbtide.features.cycles.tables import move_text

CYCLES = Need(
    "cycles around the iterations (parts that `ebbtide.step` marks, or that repeat)",
    lambda metrics: slowest_cycles(metrics.trace) is not None,
)


@rule("moved-state", ITERATIONS, CYCLES)
def moved_state(metrics: JobMetrics) -> Finding | None:
    """Report moves of state in a cycle that could be left out, or be faster."""
    cycles = slowest_cycles(metrics.trace)
    if cycles is None or not cycles.moves:
        return None
    changes = advise(cycles).changes
    if not changes:
        return None
    best = changes[0]
    moved = sum(move.median_ms for move in cycles.moves if move.is_copied)
    share = f"{100 * min(moved / cycles.median_ms, 1.0):.0f} %"
    return moved_state.finding(
        f"Moves of state take {share} of a cycle",
        best.saved_ms / max(cycles.iterations, 1.0),
        (*map(move_text, cycles.moves), best.evidence),
        best.text,
    )
