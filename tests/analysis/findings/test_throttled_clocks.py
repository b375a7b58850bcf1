"""The rule on lowered clocks: `throttled-clocks`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ebbtide.analysis.findings.rules.gpu import throttled_clocks
from tests.analysis.findings.jobs import MS, Job, on_cpu, on_gpu

IDLE, USER, POWER, HEAT = 0x1, 0x2, 0x4, 0x40
ITERATION_MS = 405


def gpu_samples(
    job: Job,
    phase: str,
    clock: float | None,
    reasons: int | None,
    ranks: Iterable[int] | None = None,
) -> Job:
    """Add samples every 10 ms of a phase of each iteration."""
    for number in job.ranks if ranks is None else ranks:
        for begin in job.begins[number, phase]:
            for after in range(0, round(job.ms[phase]), 10):
                row = {"sm_clock_mhz": clock, "throttle_reasons": reasons}
                job.builder.rank(number).gpu(
                    begin + after * MS, f"cuda:{number}", **row
                )
    return job


def throttled(
    job: Job, clock: float, reasons: int, ranks: Iterable[int] | None = None
) -> Job:
    """Add samples of a GPU that is limited in its backwards, and runs at 2 GHz
    otherwise."""
    for phase in ("other", "forward", "update"):
        gpu_samples(job, phase, 2000, 0)
    for number in job.ranks:
        limited = ranks is None or number in ranks
        gpu_samples(
            job,
            "backward",
            clock if limited else 2000,
            reasons if limited else 0,
            [number],
        )
    return job


def test_throttled_clocks__gain_is_share_of_clock_in_throttled_time() -> None:
    finding = throttled(on_gpu(), 1500, POWER).finding(throttled_clocks)
    assert finding.potential_gain_ms == pytest.approx(200 * 0.25)
    assert finding.evidence == (
        "rank 0: a power or thermal limit lowers the clocks for 200.0 ms of "
        f"{ITERATION_MS}.0 ms (49 %), by 25 % below "
        "the highest SM clock on average",
        "software power cap: 49 % of the samples",
    )
    assert "power limit" in finding.advice
    assert "temperature" not in finding.advice


def test_throttled_clocks__names_every_limit() -> None:
    finding = throttled(on_gpu(), 1500, POWER | HEAT | USER).finding(throttled_clocks)
    assert [text.partition(":")[0] for text in finding.evidence[1:]] == [
        "software power cap",
        "hardware thermal slowdown",
    ]
    assert finding.advice.startswith("check temperature")
    assert "power limit" in finding.advice


@pytest.mark.parametrize("reasons", [0, IDLE, USER, IDLE | USER])
def test_throttled_clocks__ignores_clocks_that_are_low_on_purpose(reasons: int) -> None:
    assert throttled(on_gpu(), 1000, reasons).result(throttled_clocks) is None


@pytest.mark.parametrize(
    ("clock", "reported"), [(1890, True), (1910, False), (2000, False)]
)
def test_throttled_clocks__needs_twentieth_of_clock(
    clock: float, reported: bool
) -> None:
    assert (
        throttled(on_gpu(), clock, POWER).result(throttled_clocks) is not None
    ) == reported


@pytest.mark.parametrize(("backward", "reported"), [(20, False), (30, True)])
def test_throttled_clocks__needs_tenth_of_iteration(
    backward: float, reported: bool
) -> None:
    job = throttled(on_gpu(backward=backward), 1000, POWER)
    assert (job.result(throttled_clocks) is not None) == reported


def test_throttled_clocks__reports_rank_that_loses_most() -> None:
    finding = throttled(on_gpu(2), 1500, HEAT, [1]).finding(throttled_clocks)
    assert finding.evidence[0].startswith("rank 1: ")


@pytest.mark.parametrize(
    "job",
    [
        on_gpu(),
        on_cpu(),
        gpu_samples(on_gpu(), "backward", 2000, None),
        gpu_samples(on_gpu(), "backward", None, POWER),
    ],
)
def test_throttled_clocks__does_not_apply_without_clocks_and_reasons(job: Job) -> None:
    assert "throttled-clocks" in {entry.rule for entry in job.results.not_applicable}
