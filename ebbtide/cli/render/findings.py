"""Prints findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.findings import Findings
    from ebbtide.profiler.trace import Trace


def print_findings(trace: Trace, findings: Findings, iteration_ms: float | None) -> None:
    """Print findings with evidence, advice and estimated gain; `iteration_ms`: median iteration, None if not known."""
    typer.echo(f"{trace.path}: {len(findings.findings)} finding{'s' if len(findings.findings) != 1 else ''}")
    for number, finding in enumerate(findings.findings, 1):
        gain = ""
        if finding.potential_gain_ms is not None:
            share = f" of {ms_text(iteration_ms)}" if iteration_ms else ""
            gain = f" (potential gain: up to {ms_text(finding.potential_gain_ms)}{share} per iteration)"
        typer.echo(f"\n{number}. {finding.title}{gain}")
        for evidence in finding.evidence:
            typer.echo(f"   - {evidence}")
        typer.echo(f"   {finding.advice}")
    if sum(finding.potential_gain_ms is not None for finding in findings.findings) > 1:
        typer.echo("\nEstimated gains overlap; do not add them.")
    if findings.unknown:
        typer.echo("\nThis trace cannot answer:")
        for unknown in findings.unknown:
            typer.echo(f"   - {unknown.question}\n     {unknown.record}")
    if findings.not_applicable:
        rules_by_needs: dict[tuple[str, ...], list[str]] = {}
        for entry in findings.not_applicable:
            rules_by_needs.setdefault(entry.needs, []).append(entry.rule)
        typer.echo("\nRules that do not apply, and what they need:")
        for needs, rules in rules_by_needs.items():
            typer.echo(f"   - {', '.join(needs)}: {', '.join(rules)}")
