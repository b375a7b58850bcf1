"""Updates that the CPU holds up."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.update import cpu_bound_update, too_few_threads
from tests.analysis.findings.jobs import GIB, PARAMS, PEAK, Job, async_copies, offloaded, on_cpu, on_gpu


def worth(update_ms: float, params: float, busiest: float) -> float:
    """What is left out of an update if the idle part of the link, at 80 % of its peak, carries its share."""
    cpu = params / (update_ms / 1e3)
    link = 0.8 * PEAK * (1 - busiest) / 12
    return update_ms - params / (cpu + link) * 1e3


@pytest.mark.parametrize(("h2d", "d2h"), [(0.0, 0.0), (0.1, 0.4), (0.49, 0.2)])
def test_an_update_beside_an_idle_link_is_worth_what_the_link_could_carry(h2d: float, d2h: float) -> None:
    found = offloaded(update=400).sample("update", h2d, d2h).finding(cpu_bound_update)
    assert found.worth_ms == pytest.approx(worth(400, PARAMS, max(h2d, d2h)))
    assert f"h2d is used to {100 * h2d:.0f} % of the link's peak, d2h to {100 * d2h:.0f} %" in found.evidence[1]
    assert "400.0 ms, 57 % of the iteration" in found.evidence[0]
    assert "2.5 G parameters/s" in found.evidence[2]


def test_copies_tell_it_as_counters_do() -> None:
    job = offloaded(update=400).copy("h2d", "update", 0, 400, int(0.2 * PEAK * 0.4), "pageable")
    assert job.finding(cpu_bound_update).worth_ms == pytest.approx(worth(400, PARAMS, 0.2), rel=1e-6)


def test_of_a_static_split_only_the_cpus_part_is_updated_there() -> None:
    found = offloaded(update=400, ratio=0.25).sample("update", 0.0, 0.0).finding(cpu_bound_update)
    assert found.worth_ms == pytest.approx(worth(400, PARAMS / 4, 0.0))
    assert "625 M parameters/s" in found.evidence[2]
    assert "250 M offloaded" in found.evidence[3]


def test_the_least_free_rank_tells_what_would_fit() -> None:
    job = offloaded(2, update=400, used=60).sample("update", 0.0, 0.0).memory("device", {"backward": 70}, rank=1)
    line = job.finding(cpu_bound_update).evidence[3]
    assert f"10.00 GiB of device memory are free: the state of {10 * GIB / 12e6:.0f} M" in line


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded(update=400)),
        offloaded(update=400).sample("update", 0.0, 0.51),
        offloaded(update=33).sample("update", 0.0, 0.0),  # of an iteration of 338 ms
        on_gpu(update=400).sample("update", 0.0, 0.0),
        on_cpu(update=4000),
        offloaded(update=400, ratio=0).sample("update", 0.0, 0.0),
    ],
)
def test_nothing_to_say_of_a_busy_link_a_short_update_or_one_on_the_gpu(job: Job) -> None:
    assert job.says(cpu_bound_update) is None


def test_a_tenth_of_the_iteration_is_enough() -> None:
    assert offloaded(update=35).sample("update", 0.0, 0.0).finding(cpu_bound_update).worth_ms == pytest.approx(
        worth(35, PARAMS, 0.0)
    )


def test_without_a_link_it_asks_for_one_and_without_a_peak_for_that() -> None:
    bare = offloaded(update=400).says(cpu_bound_update)
    assert isinstance(bare, Unknown)
    assert "--transfers" in bare.record
    for job in (
        offloaded(update=400, peak=None).sample("update", 0.1, 0.1),
        offloaded(update=400, peak=None).copy("h2d", "update", 0, 10, 10),
    ):
        said = job.says(cpu_bound_update)
        assert isinstance(said, Unknown)
        assert "--link" in said.record
        assert "--transfers" not in said.record


def test_a_job_whose_parameters_are_not_counted_has_no_worth() -> None:
    found = (
        offloaded(update=400)
        .meta(optimizers=[{"class": "DeepSpeedCPUAdam"}])
        .sample("update", 0, 0)
        .finding(cpu_bound_update)
    )
    assert found.worth_ms is None
    assert len(found.evidence) == 2


@pytest.mark.parametrize(("ranks", "torch", "possible"), [(1, 1, 64), (2, 4, 32), (4, 7, 16)])
def test_too_few_threads_are_worth_what_more_of_them_would_save(ranks: int, torch: int, possible: int) -> None:
    job = offloaded(ranks, update=400).meta(threads={"torch": torch, "omp": str(torch)})
    found = job.finding(too_few_threads)
    assert found.worth_ms == pytest.approx(400 * (1 - torch / possible))
    assert f"OMP_NUM_THREADS={possible}" in found.advice
    assert f"64 cores, {possible} a rank" in found.evidence[1]


def test_half_the_cores_are_enough_since_two_threads_may_share_one() -> None:
    assert offloaded(4, update=400).meta(threads={"torch": 8, "omp": None}).says(too_few_threads) is None


def test_ranks_that_were_not_recorded_need_cores_too() -> None:
    job = offloaded(1, update=400).meta(threads={"torch": 8, "omp": None}, world_size=8)
    assert job.says(too_few_threads) is None
    assert job.meta(threads={"torch": 3, "omp": None}).finding(too_few_threads).worth_ms == pytest.approx(400 * 5 / 8)


def test_ranks_of_other_hosts_take_no_cores_here() -> None:
    job = offloaded(4, update=400).meta(threads={"torch": 8, "omp": None})
    for number in (2, 3):
        job.builder.rank(number, host="other")
    assert job.finding(too_few_threads).worth_ms == pytest.approx(400 * (1 - 8 / 32))


@pytest.mark.parametrize("threads", [{}, {"torch": None, "omp": None}, {"torch": "many"}, None])
def test_threads_that_were_not_recorded_are_asked_for(threads: Any) -> None:
    assert isinstance(offloaded(update=400).meta(threads=threads).says(too_few_threads), Unknown)


@pytest.mark.parametrize("cores", [None, "some"])
def test_so_are_cores(cores: Any) -> None:
    job = offloaded(update=400).meta(threads={"torch": 1, "omp": "1"})
    job.builder.meta["host"]["cpu"]["cores"] = cores
    assert isinstance(job.says(too_few_threads), Unknown)
    job.builder.meta.pop("host")
    assert isinstance(job.says(too_few_threads), Unknown)


def test_a_job_on_the_cpu_has_an_update_there_too() -> None:
    assert on_cpu(torch=1, cores=2, update=400).says(too_few_threads) is None
    assert on_cpu(torch=1, cores=8, update=400).finding(too_few_threads).worth_ms == pytest.approx(350)
    assert on_cpu(torch=1, cores=8, update=10).says(too_few_threads) is None
    assert on_gpu(update=400).meta(threads={"torch": 1, "omp": "1"}).says(too_few_threads) is None
