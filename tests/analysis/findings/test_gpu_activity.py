"""Rules on the activity of the GPU: idle, waiting for communication, waiting for
launches."""

from __future__ import annotations

from ebbtide.analysis.findings.rules.gpu import (
    exposed_communication,
    gpu_idle,
    launch_bound,
)
from ebbtide.analysis.findings.rules.iterations import between_phases
from tests.analysis.findings.jobs import Job, on_gpu

PHASES = ("other", "forward", "backward", "update")


def busy(job: Job, *left_out: str, ranks: list[int] | None = None) -> Job:
    """Fill all phases but some with one kernel each."""
    for phase in PHASES:
        if phase not in left_out:
            job.kernels(phase, [0], job.ms[phase], ranks=ranks)
    return job


def test_rules__find_nothing_in_a_busy_gpu() -> None:
    job = busy(on_gpu())
    assert [
        job.result(rule.check)
        for rule in (gpu_idle, launch_bound, exposed_communication)
    ] == [None] * 3


def test_gpu_idle__names_the_cause_and_the_phase() -> None:
    late = busy(on_gpu(), "update").kernels("update", [80], 20, 10)
    finding = late.finding(gpu_idle)
    # The update's copy of 0.01 ms runs after 99 ms, beside the kernel.
    assert finding.potential_gain_ms == 80.0
    assert any(
        "80.0 ms: the host launched nothing" in line for line in finding.evidence
    )
    assert "all idle time by phase: update 80.0 ms" in finding.evidence
    assert "host" in finding.advice
    queued = busy(on_gpu(), "update").kernels("update", [80], 20, 81)
    assert "dependencies" in queued.finding(gpu_idle).advice
    unknown = busy(on_gpu(), "update").kernels("update", [80], 20, None)
    assert "ProfilerActivity.CPU" in unknown.finding(gpu_idle).advice


def test_gpu_idle__is_of_the_rank_that_is_idle_most() -> None:
    job = busy(busy(on_gpu(2), ranks=[0]), "update", ranks=[1]).kernels(
        "update", [50], 50, 10, ranks=[1]
    )
    assert job.finding(gpu_idle).evidence[0].startswith("rank 1: nothing runs")


def test_launch_bound__sums_short_gaps_before_late_launches() -> None:
    # Gaps of 0.1 ms before 500 kernels, each launched 0.05 ms before it runs.
    job = busy(on_gpu(), "update").kernels(
        "update", [0.2 * n for n in range(500)], 0.1, 0.05
    )
    finding = job.finding(launch_bound)
    assert finding.potential_gain_ms is not None
    assert abs(finding.potential_gain_ms - 50) < 0.2
    assert job.result(gpu_idle) is None
    launched_in_time = busy(on_gpu(), "update").kernels(
        "update", [0.2 * n for n in range(500)], 0.1, 0.15
    )
    assert launched_in_time.result(launch_bound) is None


def test_exposed_communication__counts_only_what_no_compute_covers() -> None:
    job = (
        busy(on_gpu(), "update")
        .kernels("update", [0], 60)
        .kernels("update", [10], 90, kind="communication")
    )
    finding = job.finding(exposed_communication)
    assert finding.potential_gain_ms == 40.0
    assert "update 40.0 ms" in finding.evidence[1]
    hidden = busy(on_gpu()).kernels("update", [10], 80, kind="communication")
    assert hidden.result(exposed_communication) is None


def test_exposed_communication__names_the_wait_for_other_ranks() -> None:
    job = busy(on_gpu(2), "update")
    job.kernels("update", [0], 90, kind="communication", ranks=[0]).kernels(
        "update", [50], 40, kind="communication", ranks=[1]
    )
    finding = job.finding(exposed_communication)
    # 8 iterations of 50 ms each.
    assert (
        "over the whole trace rank 0 waits 400.0 ms in collectives for ranks that come "
        "later" in finding.evidence
    )


def test_between_phases__does_not_blame_the_host_for_work_of_the_gpu() -> None:
    job = on_gpu(other=200)
    assert "200.0 ms" in job.finding(between_phases).evidence[0]
    assert (
        busy(on_gpu(other=200), "other")
        .kernels("other", [0], 195, 1, "communication")
        .result(between_phases)
        is None
    )
    idle = (
        busy(on_gpu(other=200), "other")
        .kernels("other", [0], 20)
        .finding(between_phases)
    )
    assert "180.0 ms" in idle.evidence[0]
    assert "neither computes nor communicates" in idle.evidence[0]
