"""The text of findings."""

from ebbtide.analysis.findings.finding import Findings
from ebbtide.analysis.metrics.iteration_mean import mean_text, uneven_iterations
from ebbtide.analysis.metrics.missing import on_demand_remarks, out_of_memory_remarks
from ebbtide.analysis.tables.table import Gain, View
from ebbtide.profiler.trace import Trace
from ebbtide.units import counted, ms_text

# Findings that people read at first.
_FIRST = 5


def findings_view(
    trace: Trace, findings: Findings, iteration_ms: float | None, verbose: bool = True
) -> View:
    """Return findings with advice and estimated gain.

    With `verbose`, it has also evidence, and the rules that found nothing.
    `iteration_ms`: median iteration, None if not known.
    """
    times = uneven_iterations(trace)
    iteration = (
        f"{ms_text(iteration_ms)} an iteration{mean_text(times)}, "
        if iteration_ms
        else ""
    )
    overlap = (
        " (gains overlap)"
        if sum(one.potential_gain_ms is not None for one in findings.findings) > 1
        else ""
    )
    first = (
        f"{trace.path}: "
        f"{iteration}{counted(len(findings.findings), 'finding')}{overlap}"
    )
    # Nothing that holds a job back is a result, too.
    yield first if findings.findings else Gain(first)
    if times is not None:
        yield f"  {times.line}"
    yield from on_demand_remarks(trace)
    yield from out_of_memory_remarks(trace)
    shown = findings.findings if verbose else findings.findings[:_FIRST]
    for number, finding in enumerate(shown, 1):
        has_limit = finding.potential_gain_ms is not None and not finding.is_simulated
        yield f"{number}. {finding.title}" + (
            f" (up to {ms_text(finding.potential_gain_ms)})" if has_limit else ""
        )
        yield from (f"   - {evidence}" for evidence in finding.evidence if verbose)
        yield Gain(f"   DO  {finding.advice}")
        if numbers := findings.removed_numbers(finding):
            yield f"   also removes: {', '.join(map(str, numbers))}"
    if verbose:
        yield from _other_rules(findings)
    else:
        yield from _left_out(findings)


def _left_out(findings: Findings) -> View:
    """Yield what the short form leaves out."""
    others = len(findings.findings) - _FIRST
    parts = [counted(others, "more finding")] if others > 0 else []
    parts += (
        [counted(len(findings.unknown), "question") + " without an answer"]
        if findings.unknown
        else []
    )
    parts += ["evidence"] if findings.findings else []
    yield f"{', '.join([*parts, 'other rules'])}: -v"


def _other_rules(findings: Findings) -> View:
    """Yield the questions without an answer, and the rules that report nothing or do
    not apply."""
    if findings.unknown:
        yield "This trace cannot answer:"
        for unknown in findings.unknown:
            yield f"   - {unknown.question}"
            yield f"     {unknown.record}"
    if findings.nothing_found:
        yield "Rules that looked and found nothing:"
        yield f"   {', '.join(findings.nothing_found)}"
    if findings.not_applicable:
        rules_by_needs: dict[tuple[str, ...], list[str]] = {}
        for entry in findings.not_applicable:
            rules_by_needs.setdefault(entry.needs, []).append(entry.rule)
        yield (
            "Rules that do not apply, because they need what this trace or job does "
            "not have:"
        )
        for needs, rules in rules_by_needs.items():
            yield f"   - {', '.join(rules)}"
            yield f"     needs: {'; '.join(needs)}"
