"""The rules on state on storage: reported where the job waits for it, with the settings
that end the waits."""

from __future__ import annotations

from ebbtide.analysis.findings import find
from ebbtide.profiler.trace import Trace
from tests.analysis.metrics.storage_jobs import SUBGROUP, swapped_job


def test_findings__are_about_the_settings_that_cause_the_waits() -> None:
    def advice_by_rule(trace: Trace) -> dict[str, str]:
        return {finding.rule: finding.advice for finding in find(trace).findings}

    best = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    rules = {
        "storage-waits",
        "gradients-on-storage",
        "few-swap-buffers",
        "lost-moments",
    }
    default = advice_by_rule(swapped_job(gradients=True))
    assert rules & default.keys() == {
        "storage-waits",
        "gradients-on-storage",
        "few-swap-buffers",
    }
    assert f"aio.block_size to {4 * SUBGROUP:,}" in default["gradients-on-storage"]
    assert "pipeline_read" in default["storage-waits"]
    assert rules & advice_by_rule(swapped_job(waits_ms=19, **best)).keys() == set()
    assert "pipeline_read" not in advice_by_rule(swapped_job(**best))["storage-waits"]
