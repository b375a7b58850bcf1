"""Time outside the phases, and ranks that are slower than others."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings import Unknown
from ebbtide.analysis.findings.iteration import between_phases, phases_recorded, slow_rank
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import Job, on_cpu, on_gpu


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
@pytest.mark.parametrize(("other", "there"), [(70, False), (71, True), (400, True)])
def test_much_time_between_the_phases_is_worth_that_time(make: type[Job], other: float, there: bool) -> None:
    job = make(other=other)  # beside 400 ms of phases: 70.6 ms are 15 %
    assert (job.says(between_phases) is not None) == there
    if there:
        found = job.finding(between_phases)
        assert found.worth_ms == pytest.approx(other)
        assert f"({100 * other / (400 + other):.0f} %)" in found.evidence[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("delay", [9, 60])
def test_a_slow_rank_is_worth_its_delay(ranks: int, delay: float) -> None:
    found = on_gpu(ranks, slower={(1, "forward"): delay / 3, (1, "backward"): 2 * delay / 3}).finding(slow_rank)
    assert found.worth_ms == pytest.approx(delay)
    assert found.title == "Rank 1 is slower than the others"
    assert "rank 1 is the slowest in 6 of 6 iterations" in found.evidence[0]
    assert f"{400 + delay:.1f} ms" in found.evidence[1]
    assert "400.0 ms" in found.evidence[1]


def test_two_slow_ranks_of_three_make_the_third_fast() -> None:
    # The slowest gains what it has above the median of the others.
    found = on_gpu(3, slower={(0, "forward"): 40, (2, "forward"): 60}).finding(slow_rank)
    assert found.worth_ms == pytest.approx(20)


@pytest.mark.parametrize("slower", [{}, {(1, "forward"): 7.9}, {(1, "other"): 60}])
def test_equal_ranks_small_differences_and_waiting_are_well(slower: dict[tuple[int, str], float]) -> None:
    assert on_gpu(2, slower=slower).says(slow_rank) is None
    assert on_cpu(2).says(slow_rank) is None


@pytest.mark.parametrize(("often", "there"), [(8, True), (7, False)])
def test_it_takes_four_iterations_of_five(often: int, there: bool) -> None:
    builder = TraceBuilder(warmup_iterations=0)
    for number in range(2):
        now = 0
        for iteration in range(10):
            slow = number == (1 if iteration < often else 0)
            for phase, length in (("forward", 100 + 20 * slow), ("backward", 200), ("update", 50)):
                builder.rank(number).phase(phase, now, now + length, iteration)
                now += length
    job = Job(0)
    job.builder = builder
    assert (job.says(slow_rank) is not None) == there


def test_a_trace_without_iterations_is_asked_for_them() -> None:
    job = Job(1, iterations=0)
    assert isinstance(job.says(phases_recorded), Unknown)
    assert Job(1, iterations=1).says(phases_recorded) is None
    assert job.says(slow_rank) is None
    assert job.says(between_phases) is None
