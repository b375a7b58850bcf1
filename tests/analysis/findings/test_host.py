"""The rule `swapping`."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings import Unknown, swapping
from tests.analysis.findings.jobs import Job, devices, offloaded, on_cpu, on_gpu


@pytest.mark.parametrize("make", [on_gpu, offloaded, on_cpu])
def test_swapping__reports_swapped_memory_of_any_job(make: type[Job]) -> None:
    job = make().memory("swap", {"update": 0.5}, "cpu")
    finding = job.finding(swapping.check)
    assert finding.potential_gain_ms is None
    assert "512.00 MiB" in finding.evidence[0]
    assert make().result(swapping.check) is None


@pytest.mark.parametrize(("mib", "reported"), [(63, False), (65, True)])
def test_swapping__ignores_few_pages(mib: int, reported: bool) -> None:
    assert (on_cpu().memory("swap", {"other": mib / 1024}, "cpu").result(swapping.check) is not None) == reported


@pytest.mark.parametrize(("used", "reported"), [(77, False), (78, True)])
def test_swapping__reports_full_host(used: float, reported: bool) -> None:
    job = devices(Job(2)).memory("host", {"other": used}, "cpu")
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = 80 * 2**30
    assert (job.result(swapping.check) is not None) == reported
    if reported:
        assert "78.00 GiB of 80.00 GiB" in job.finding(swapping.check).evidence[0]
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = None
    assert job.result(swapping.check) is None


def test_swapping__asks_for_missing_records() -> None:
    assert isinstance(devices(Job(2)).result(swapping.check), Unknown)
