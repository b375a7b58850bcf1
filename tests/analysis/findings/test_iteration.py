"""The rules `phases`, `between-phases` and `slow-rank`."""

from __future__ import annotations

import pytest

from ebbtide.analysis.findings.rules.iterations import between_phases, slow_rank
from ebbtide.profiler.agent.without_gradients import NAME
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import MS, Job, on_cpu, on_gpu
from tests.conftest import slow_case


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
@pytest.mark.parametrize(("other", "reported"), [(70, False), (71, True), (400, True)])
def test_between_phases__gain_is_time_outside_phases(
    make: type[Job], other: float, reported: bool
) -> None:
    job = make(other=other)  # 70.6 ms are 15 % of an iteration with 400 ms of phases
    assert (job.result(between_phases) is not None) == reported
    if reported:
        finding = job.finding(between_phases)
        assert finding.potential_gain_ms == pytest.approx(other)
        assert f"({100 * other / (400 + other):.0f} %)" in finding.evidence[0]


def with_forwards(job: Job, ms: float) -> Job:
    """Add a forward without gradients to each iteration, 10 ms after the beginning of
    its `other`."""
    for (number, phase), begins in job.begins.items():
        for iteration, begin in enumerate(begins if phase == "other" else []):
            start = begin + 10 * MS
            job.builder.rank(number).add(
                "ops",
                start_ns=start,
                end_ns=start + round(ms * MS),
                resource="host",
                name=NAME,
                iteration=iteration,
            )
    return job


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
def test_between_phases__names_forwards_without_gradients(make: type[Job]) -> None:
    finding = with_forwards(make(other=200), 180).finding(between_phases)
    assert finding.potential_gain_ms is None
    assert finding.title == "Forwards without gradients take 30 % of the iteration"
    assert "180.0 ms of 600.0 ms" in finding.evidence[0]
    assert "data loading" not in finding.advice


def test_between_phases__gains_what_is_not_a_forward() -> None:
    finding = with_forwards(on_cpu(other=300), 180).finding(between_phases)
    assert finding.potential_gain_ms == pytest.approx(120)
    assert "120.0 ms of 700.0 ms (17 %) belong to no phase" in finding.evidence[0]
    assert "180.0 ms" in finding.evidence[1]
    assert finding.advice.startswith(
        "look at what runs around the forwards without gradients"
    )
    # Neither part is much of the iteration.
    assert with_forwards(on_cpu(other=130), 65).result(between_phases) is None


@pytest.mark.parametrize("make", [on_gpu, on_cpu])
@pytest.mark.parametrize(
    ("stalls", "ms", "reported"),
    [(3, 400, True), (2, 900, False), (3, 200, False), (7, 400, True)],
)
def test_between_phases__sees_stalls_that_medians_hide(
    make: type[Job], stalls: int, ms: float, reported: bool
) -> None:
    # 405 ms an iteration; the first two of them warm up.
    job = make(iterations=17, stalls=dict.fromkeys(range(2, 2 + 2 * stalls, 2), ms))
    assert (job.result(between_phases) is not None) == reported
    if reported:
        finding = job.finding(between_phases)
        assert finding.potential_gain_ms == pytest.approx(stalls * ms / 15)
        assert (
            finding.title
            == "Some iterations stall outside forward, backward and update"
        )
        assert finding.evidence[0].startswith(
            f"{stalls} of 15 iterations take {ms:.1f} ms longer"
        )


@pytest.mark.parametrize("ranks", [2, slow_case(3), slow_case(4)])
@pytest.mark.parametrize("delay", [9, 60])
def test_slow_rank__gain_is_its_delay(ranks: int, delay: float) -> None:
    finding = on_gpu(
        ranks, slower={(1, "forward"): delay / 3, (1, "backward"): 2 * delay / 3}
    ).finding(slow_rank)
    assert finding.potential_gain_ms == pytest.approx(delay)
    assert finding.title.startswith("Rank 1 differs from the others: slow ")
    assert f"all phases {400 + delay:.1f} ms, usual 400.0 ms" in finding.evidence[0]


def test_slow_rank__compares_with_median_of_others() -> None:
    # None of the three stands out. The gain is the time above the median of the others.
    finding = on_gpu(3, slower={(0, "forward"): 40, (2, "forward"): 60}).finding(
        slow_rank
    )
    assert finding.title == "Rank 2 is slower than the others"
    assert "rank 2 is the slowest in 6 of 6 iterations" in finding.evidence[0]
    assert finding.potential_gain_ms == pytest.approx(20)


@pytest.mark.parametrize("slower", [{}, {(1, "forward"): 7.9}, {(1, "other"): 7.9}])
def test_slow_rank__is_none_for_nearly_equal_ranks(
    slower: dict[tuple[int, str], float],
) -> None:
    assert on_gpu(2, slower=slower).result(slow_rank) is None
    assert on_cpu(2).result(slow_rank) is None


@pytest.mark.parametrize(("slow_iterations", "reported"), [(8, True), (5, False)])
def test_slow_rank__needs_most_iterations(slow_iterations: int, reported: bool) -> None:
    builder = TraceBuilder(warmup_iterations=0)
    for number in range(2):
        now = 0
        for iteration in range(10):
            slow = number == (1 if iteration < slow_iterations else 0)
            for phase, length in (
                ("forward", 100 + 20 * slow),
                ("backward", 200),
                ("update", 50),
            ):
                builder.rank(number).phase(phase, now, now + length, iteration)
                now += length
    job = Job(0)
    job.builder = builder
    assert (job.result(slow_rank) is not None) == reported
