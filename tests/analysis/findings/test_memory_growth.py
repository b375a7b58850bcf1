"""The rule `memory-growth`."""

from __future__ import annotations

from ebbtide.analysis import TraceAnalysis
from tests.analysis.metrics.holders.test_growth import job


def test_memory_growth__names_the_call_site_and_its_bytes() -> None:
    (finding,) = [
        entry
        for entry in TraceAnalysis(job(5, 5)).findings().findings
        if entry.rule == "memory-growth"
    ]
    assert finding.evidence == (
        "rank 0: each of 4 iterations leaves at least 64 B behind",
        "64 B by keep (/job/model.py:3)",
    )


def test_memory_growth__is_looked_for_only_where_allocations_were_recorded() -> None:
    findings = TraceAnalysis(job(5, 0)).findings()
    assert "memory-growth" in findings.nothing_found
    findings = TraceAnalysis(job(2, 2)).findings()
    assert "memory-growth" in [entry.rule for entry in findings.not_applicable]
