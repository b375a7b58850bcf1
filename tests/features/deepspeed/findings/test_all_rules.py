"""The rules on DeepSpeed among all rules."""

from __future__ import annotations

from ebbtide.analysis.findings import find
from tests.analysis.findings.jobs import NO_OFFLOAD, on_gpu
from tests.analysis.findings.test_find import troubled

SILENT = {
    "pageable-masters",
    "passes-beside-adam",
    "twin-flow-ratio",
    "gradient-round-trip",
}


def test_find__names_a_wait_for_gradients_that_the_root_cause_removes() -> None:
    results = find(troubled().trace, NO_OFFLOAD)
    rules = {finding.rule for finding in results.findings}
    assert "blocking-gradients" in rules
    root_cause = results.findings[0]
    assert set(root_cause.removes) == {
        "blocking-gradients",
        "cpu-bound-update",
        "too-few-threads",
    }
    assert not rules & SILENT
    assert {
        *results.nothing_found,
        *(entry.rule for entry in results.not_applicable),
    } >= SILENT


def test_find__needs_a_deepspeed_job() -> None:
    needs = {entry.rule: entry.needs for entry in on_gpu().results.not_applicable}
    assert needs["gradient-round-trip"] == (
        "optimizer state in host memory",
        "a DeepSpeed job",
    )
