"""Prints findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.findings import Findings
    from ebbtide.profiler.trace import Trace


def print_findings(trace: Trace, findings: Findings, iteration_ms: float | None) -> None:
    """Print findings with evidence, advice and estimated gain; `iteration_ms`: median iteration, None if not known."""
    from ebbtide.analysis.metrics.missing import on_demand_remarks

    echo(f"{trace.path}: {_counts(findings)}")
    for remark in on_demand_remarks(trace):
        echo(remark)
    for number, finding in enumerate(findings.findings, 1):
        gain = ""
        if finding.potential_gain_ms is not None:
            share = f" of {ms_text(iteration_ms)}" if iteration_ms else ""
            gain = f" (potential gain: up to {ms_text(finding.potential_gain_ms)}{share} per iteration)"
        echo(f"\n{number}. {finding.title}{gain}")
        for evidence in finding.evidence:
            echo(f"   - {evidence}")
        echo(f"   {finding.advice}")
    if sum(finding.potential_gain_ms is not None for finding in findings.findings) > 1:
        echo("\nEstimated gains overlap; do not add them.")
    if findings.unknown:
        echo("\nThis trace cannot answer:")
        for unknown in findings.unknown:
            echo(f"   - {unknown.question}\n     {unknown.record}")
    if findings.nothing_found:
        echo(f"\nRules that looked and found nothing:\n   {', '.join(findings.nothing_found)}")
    if findings.not_applicable:
        rules_by_needs: dict[tuple[str, ...], list[str]] = {}
        for entry in findings.not_applicable:
            rules_by_needs.setdefault(entry.needs, []).append(entry.rule)
        echo("\nRules that do not apply, because they need what this trace or job does not have:")
        for needs, rules in rules_by_needs.items():
            echo(f"   - {', '.join(rules)}\n     needs: {'; '.join(needs)}")


def _counts(findings: Findings) -> str:
    """Return how many rules have which result."""
    findings_count = len(findings.findings)
    counts = [f"{findings_count} finding{'s' if findings_count != 1 else ''}"]
    if findings.unknown:
        questions = len(findings.unknown)
        counts.append(f"{questions} question{'s' if questions != 1 else ''} without an answer")
    if findings.nothing_found:
        silent = len(findings.nothing_found)
        counts.append(f"{silent} rule{'s' if silent != 1 else ''} with nothing found")
    if findings.not_applicable:
        counts.append(f"{len(findings.not_applicable)} that do not apply")
    return ", ".join(counts)
