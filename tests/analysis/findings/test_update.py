"""The rules on updates on the CPU: `cpu-bound-update`, `too-few-threads`."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.rules.host import too_few_threads
from ebbtide.analysis.findings.rules.update import cpu_bound_update, update_bound
from ebbtide.errors import TraceError
from tests.analysis.findings.jobs import (
    GIB,
    PARAMS,
    PEAK,
    Job,
    async_copies,
    devices,
    offloaded,
    on_cpu,
    on_gpu,
    split_by_stub,
)


def gain_ms(update_ms: float, params: float, busiest: float) -> float:
    """Return the ms saved if the idle part of the link, at 80 % of its peak, carries
    its share."""
    cpu = params / (update_ms / 1e3)
    link = 0.8 * PEAK * (1 - busiest) / 12
    return update_ms - params / (cpu + link) * 1e3


@pytest.mark.parametrize(("h2d", "d2h"), [(0.0, 0.0), (0.1, 0.4), (0.49, 0.2)])
def test_cpu_bound_update__gain_is_what_idle_link_could_carry(
    h2d: float, d2h: float
) -> None:
    finding = offloaded(update=400).sample("update", h2d, d2h).finding(cpu_bound_update)
    assert finding.potential_gain_ms == pytest.approx(
        gain_ms(400, PARAMS, max(h2d, d2h))
    )
    assert (
        f"h2d is used to {100 * h2d:.0f} % of the link's peak, d2h to {100 * d2h:.0f} %"
        in finding.evidence[1]
    )
    assert "400.0 ms, 57 % of the iteration" in finding.evidence[0]
    assert "2.5 G parameters/s" in finding.evidence[2]


def test_cpu_bound_update__accepts_copies_or_counters() -> None:
    job = offloaded(update=400).copy(
        "h2d", "update", 0, 400, int(0.2 * PEAK * 0.4), "pageable"
    )
    assert job.finding(cpu_bound_update).potential_gain_ms == pytest.approx(
        gain_ms(400, PARAMS, 0.2), rel=1e-6
    )


@pytest.mark.usefixtures("stub_framework")
def test_cpu_bound_update__counts_share_on_cpu_of_static_split() -> None:
    finding = (
        split_by_stub(0.25, update=400)
        .sample("update", 0.0, 0.0)
        .finding(cpu_bound_update)
    )
    assert finding.potential_gain_ms == pytest.approx(gain_ms(400, PARAMS / 4, 0.0))
    assert "625 M parameters/s" in finding.evidence[2]
    assert "250 M offloaded" in finding.evidence[3]


def test_cpu_bound_update__names_free_memory_of_fullest_rank() -> None:
    job = (
        offloaded(2, update=400, used=60)
        .sample("update", 0.0, 0.0)
        .memory("device", {"backward": 70}, rank=1)
    )
    evidence = job.finding(cpu_bound_update).evidence[3]
    assert (
        "10.00 GiB of device memory are free (capacity minus device): optimizer state "
        "and gradients" in evidence
    )
    assert f"(14 B each) of {10 * GIB / 14e6:.0f} M" in evidence


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded(update=400)),
        offloaded(update=400).sample("update", 0.0, 0.51),
        offloaded(update=33).sample("update", 0.0, 0.0),  # of an iteration of 338 ms
        on_gpu(update=400).sample("update", 0.0, 0.0),
        on_cpu(update=4000),
        split_by_stub(0, update=400).sample("update", 0.0, 0.0),
    ],
)
def test_cpu_bound_update__is_none_for_busy_link_or_short_update_or_gpu_update(
    job: Job,
) -> None:
    assert job.result(cpu_bound_update) is None


def test_cpu_bound_update__needs_tenth_of_iteration() -> None:
    assert offloaded(update=35).sample("update", 0.0, 0.0).finding(
        cpu_bound_update
    ).potential_gain_ms == pytest.approx(gain_ms(35, PARAMS, 0.0))


def test_cpu_bound_update__asks_for_link_or_peak() -> None:
    bare = offloaded(update=400).result(cpu_bound_update)
    assert isinstance(bare, Unknown)
    assert "--transfers" in bare.record
    for job in (
        offloaded(update=400, peak=None).sample("update", 0.1, 0.1),
        offloaded(update=400, peak=None).copy("h2d", "update", 0, 10, 10),
    ):
        result = job.result(cpu_bound_update)
        assert isinstance(result, Unknown)
        assert "--link" in result.record
        assert "--transfers" not in result.record


def test_cpu_bound_update__has_no_gain_without_parameter_count() -> None:
    finding = (
        offloaded(update=400)
        .meta(optimizers=[{"class": "DeepSpeedCPUAdam"}])
        .sample("update", 0, 0)
        .finding(cpu_bound_update)
    )
    assert finding.potential_gain_ms is None
    assert len(finding.evidence) == 2


@pytest.mark.parametrize(
    "job",
    [
        offloaded(update=400),
        offloaded(update=4000, peak=None).sample("update", 0.1, 0.1),
        devices(Job(update=400)),
    ],
)
def test_update_bound__reports_an_update_that_takes_most_without_a_link(
    job: Job,
) -> None:
    finding = job.finding(update_bound)
    assert finding.potential_gain_ms is None
    assert "% of the iteration" in finding.evidence[0]


@pytest.mark.parametrize(
    "job",
    [
        offloaded(update=100),
        offloaded(update=400).sample("update", 0.1, 0.1),
        on_cpu(update=4000),
        # No state crosses the link.
        devices(Job(update=400), peak=None).copy("h2d", "other", 1, 1, 40_000_000),
    ],
)
def test_update_bound__is_none_for_a_short_update_a_known_link_or_state_in_place(
    job: Job,
) -> None:
    assert job.result(update_bound) is None


@pytest.mark.parametrize(
    ("ranks", "torch", "possible"), [(1, 1, 64), (2, 4, 32), (4, 7, 16)]
)
def test_too_few_threads__gain_scales_with_threads(
    ranks: int, torch: int, possible: int
) -> None:
    job = offloaded(ranks, update=400).meta(threads={"torch": torch, "omp": str(torch)})
    finding = job.finding(too_few_threads)
    assert finding.potential_gain_ms == pytest.approx(400 * (1 - torch / possible))
    assert f"OMP_NUM_THREADS={possible}" in finding.advice
    assert f"64 cores, {possible} a rank" in finding.evidence[1]


def test_too_few_threads__accepts_half_of_cores() -> None:
    assert (
        offloaded(4, update=400)
        .meta(threads={"torch": 8, "omp": None})
        .result(too_few_threads)
        is None
    )


def test_too_few_threads__counts_all_logical_cores_where_each_is_a_core() -> None:
    job = offloaded(4, update=400).meta(threads={"torch": 8, "omp": None})
    job.builder.meta["host"]["cpu"]["threads_per_core"] = 1
    assert job.finding(too_few_threads).potential_gain_ms == pytest.approx(200)
    assert job.meta(threads={"torch": 9, "omp": None}).result(too_few_threads) is None
    job.builder.meta["host"]["cpu"]["threads_per_core"] = 2
    assert job.meta(threads={"torch": 8, "omp": None}).result(too_few_threads) is None


def test_too_few_threads__counts_unrecorded_ranks() -> None:
    job = offloaded(1, update=400).meta(threads={"torch": 8, "omp": None}, world_size=8)
    assert job.result(too_few_threads) is None
    assert job.meta(threads={"torch": 3, "omp": None}).finding(
        too_few_threads
    ).potential_gain_ms == pytest.approx(400 * 5 / 8)


def test_too_few_threads__ignores_ranks_of_other_hosts() -> None:
    job = offloaded(4, update=400).meta(threads={"torch": 8, "omp": None})
    for number in (2, 3):
        job.builder.rank(number, host="other")
    assert job.finding(too_few_threads).potential_gain_ms == pytest.approx(
        400 * (1 - 8 / 32)
    )


@pytest.mark.parametrize(
    "threads", [{}, {"torch": None, "omp": None}, {"omp": "many"}, None]
)
def test_too_few_threads__asks_for_threads(threads: Any) -> None:
    assert isinstance(
        offloaded(update=400).meta(threads=threads).result(too_few_threads), Unknown
    )


def test_too_few_threads__asks_for_cores() -> None:
    job = offloaded(update=400).meta(threads={"torch": 1, "omp": "1"})
    job.builder.meta["host"]["cpu"]["cores"] = None
    assert isinstance(job.result(too_few_threads), Unknown)
    job.builder.meta.pop("host")
    assert isinstance(job.result(too_few_threads), Unknown)


def test_too_few_threads__malformed_metadata_is_an_error() -> None:
    with pytest.raises(TraceError, match="damaged"):
        offloaded(update=400).meta(threads={"torch": "many"}).result(too_few_threads)
    job = offloaded(update=400)
    job.builder.meta["host"]["cpu"]["cores"] = "some"
    with pytest.raises(TraceError, match="damaged"):
        job.result(too_few_threads)


def test_too_few_threads__applies_to_jobs_on_cpu() -> None:
    assert on_cpu(torch=1, cores=2, update=400).result(too_few_threads) is None
    assert on_cpu(torch=1, cores=8, update=400).finding(
        too_few_threads
    ).potential_gain_ms == pytest.approx(350)
    assert on_cpu(torch=1, cores=8, update=10).result(too_few_threads) is None
    assert (
        on_gpu(update=400)
        .meta(threads={"torch": 1, "omp": "1"})
        .result(too_few_threads)
        is None
    )
