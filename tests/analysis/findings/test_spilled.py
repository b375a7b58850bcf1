"""The rule on memory that the driver of Windows keeps in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings.rules.spilled import spilled_memory
from ebbtide.analysis.metrics.job import JobMetrics
from tests.analysis.findings.jobs import GIB, Job

WSL, LINUX = "5.15.153.1-microsoft-standard-WSL2", "6.8.0-48-generic"
ITERATIONS, JUMP = 30, 15


def job_with_memory(
    before: float, after: float, pool: str, *, stall: float = 2000, **meta: Any
) -> Job:
    """Make a job of an 8 GiB card whose memory, GiB, changes, and whose iterations take
    `stall` ms longer from then on."""
    stalls = dict.fromkeys(range(JUMP, ITERATIONS), stall)
    job = Job(1, iterations=ITERATIONS, stalls=stalls)
    device = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 8 * GIB}
    job.builder.rank(0, devices=[{**device, "name": meta.pop("name", None)}])
    for number, begin in enumerate(job.begins[0, "other"]):
        size = before if number < JUMP else after
        job.builder.rank(0).memory(begin, round(size * GIB), pool, "cuda:0")
    job.builder.meta["host"] = {"name": "node", "kernel": meta.pop("kernel", None)}
    job.builder.meta.update(meta)
    return job


SPILLED = [
    # As torch reports it where the driver spills: more than the card has.
    (job_with_memory(22.44, 22.44, "allocated", kernel=WSL, stall=0), "22.44 GiB"),
    # The card is full, and iterations take six times as long from then on.
    (job_with_memory(6.5, 7.9, "device", kernel=WSL), "from iteration 15 on"),
    # The system is not known, as in an imported log.
    (job_with_memory(7.0, 7.8, "reserved"), "7.80 GiB of 8.00 GiB are reserved"),
]
NOT_SPILLED = [
    # A prediction does not fit; it does not spill.
    job_with_memory(22.0, 22.0, "reserved", source="predicted", stall=0),
    # Iterations become longer, and memory is free.
    job_with_memory(5.0, 6.0, "device", kernel=WSL),
    # Memory was full before.
    job_with_memory(7.9, 7.9, "device", kernel=WSL),
    # Linux without Windows below it does not spill.
    job_with_memory(6.5, 7.9, "device", kernel=LINUX),
    # The memory is the host's.
    job_with_memory(22.44, 22.44, "allocated", name="Orin", stall=0),
    # A full card, with iterations as before.
    job_with_memory(6.5, 7.9, "device", kernel=WSL, stall=0),
]


@pytest.mark.parametrize(("job", "evidence"), SPILLED)
def test_spilled_memory__names_the_setting_of_the_driver(
    job: Job, evidence: str
) -> None:
    finding = job.finding(spilled_memory)
    assert evidence in finding.evidence[0]
    assert "CUDA - Sysmem Fallback Policy" in finding.advice
    is_known = job.builder.meta["host"]["kernel"] is not None
    assert finding.advice.startswith("if the job runs under Windows") != is_known


@pytest.mark.parametrize("job", NOT_SPILLED)
def test_spilled_memory__is_silent(job: Job) -> None:
    assert spilled_memory(JobMetrics(job.trace)) is None
