"""A host without enough memory."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.host import swapping
from tests.analysis.findings.jobs import Job, devices, offloaded, on_cpu, on_gpu


@pytest.mark.parametrize("make", [on_gpu, offloaded, on_cpu])
def test_swapped_memory_is_found_on_any_job(make: type[Job]) -> None:
    job = make().memory("swap", {"update": 0.5}, "cpu")
    found = job.finding(swapping)
    assert found.worth_ms is None
    assert "512.00 MiB" in found.evidence[0]
    assert make().says(swapping) is None


@pytest.mark.parametrize(("mib", "there"), [(63, False), (65, True)])
def test_a_few_pages_are_always_swapped(mib: int, there: bool) -> None:
    assert (on_cpu().memory("swap", {"other": mib / 1024}, "cpu").says(swapping) is not None) == there


@pytest.mark.parametrize(("used", "there"), [(77, False), (78, True)])
def test_a_full_host_is_about_to_swap(used: float, there: bool) -> None:
    job = devices(Job(2)).memory("host", {"other": used}, "cpu")
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = 80 * 2**30
    assert (job.says(swapping) is not None) == there
    if there:
        assert "78.00 GiB of 80.00 GiB" in job.finding(swapping).evidence[0]
    job.builder.meta["host"]["cpu"]["capacity_bytes"] = None
    assert job.says(swapping) is None


def test_what_was_not_recorded_is_asked_for() -> None:
    assert isinstance(devices(Job(2)).says(swapping), Unknown)
