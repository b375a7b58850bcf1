"""Rules that find what slows a job down, by theme in the folder `rules`."""

from collections.abc import Mapping
from dataclasses import replace

from ebbtide.analysis.findings.finding import Finding, Findings, NotApplicable, Unknown
from ebbtide.analysis.findings.rule import Rule, all_rules, rule
from ebbtide.analysis.metrics.advice import Adviser
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.profiler.trace import Trace

__all__ = [
    "Finding",
    "Findings",
    "NotApplicable",
    "Rule",
    "Unknown",
    "all_rules",
    "find",
    "rule",
]


def find(trace: Trace, adviser: Adviser | None = None) -> Findings:
    """Apply every rule to a trace.

    Args:
        adviser: Recommends the settings that rules advise; None: rules estimate them.

    Returns:
        Findings that remove others come first, then the largest potential gain. Gains
            of different findings overlap:
        do not add them.
    """
    metrics = JobMetrics(trace, adviser)
    results = [(rule, rule(metrics)) for rule in all_rules()]
    silent = [rule for rule, result in results if result is None]
    skipped = {
        rule.name: unmet
        for rule in silent
        if (unmet := rule.unmet(metrics)) is not None
    }
    by_rule = {rule: result for rule, result in results if isinstance(result, Finding)}
    findings = [
        replace(finding, removes=_removed(finding, by_rule))
        for finding in by_rule.values()
    ]
    findings.sort(
        key=lambda finding: (-len(finding.removes), -(finding.potential_gain_ms or 0.0))
    )
    unknown = tuple(result for _, result in results if isinstance(result, Unknown))
    # A rule without needs has nothing to look for in a trace that answers its question.
    nothing_found = tuple(
        rule.name for rule in silent if rule.needs and rule.name not in skipped
    )
    return Findings(tuple(findings), unknown, tuple(skipped.values()), nothing_found)


def _removed(finding: Finding, by_rule: Mapping[Rule, Finding]) -> tuple[str, ...]:
    """Return the other findings that are gone when the advice of one is followed."""
    if finding.action is None or not finding.action.ends_offload:
        return ()
    return tuple(
        other.rule
        for rule, other in by_rule.items()
        if rule.ends_with_offload and other is not finding
    )
