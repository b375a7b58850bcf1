"""The rule `blocking-gradients`: planted waits and the gain that it estimates."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.features.deepspeed.findings.gradients import blocking_gradients
from tests.analysis.findings.jobs import (
    PARAMS,
    Job,
    async_copies,
    devices,
    offloaded,
    on_cpu,
    on_gpu,
)


def of_a_log(ranks: int = 2, **ms: Any) -> Job:
    """Make a DeepSpeed job of which only times were recorded."""
    job = devices(Job(ranks, **ms))
    job.builder.meta["deepspeed"] = {
        "config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    }
    return job


@pytest.mark.parametrize("length", [10, 120])
def test_blocking_gradients__gain_is_time_of_pageable_copies(length: int) -> None:
    job = offloaded().copy("d2h", "backward", 20, length, PARAMS * 2, "pageable")
    finding = job.finding(blocking_gradients)
    assert finding.potential_gain_ms == pytest.approx(length)
    assert "1 pageable" in finding.evidence[0]
    assert "200.0 ms" in finding.evidence[0]


def test_blocking_gradients__counts_overlapping_copies_once_on_slowest_rank() -> None:
    job = offloaded(2).copy("d2h", "backward", 0, 60, PARAMS, "pageable", ranks=[1])
    job.copy("d2h", "backward", 30, 50, PARAMS, "pageable", ranks=[1]).copy(
        "d2h", "backward", 0, 7, PARAMS, "pageable"
    )
    assert job.finding(blocking_gradients).potential_gain_ms == pytest.approx(80)


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        # 2 % of the backward are its gradients
        offloaded().copy("d2h", "backward", 0, 3.9, PARAMS, "pageable"),
        offloaded().copy("d2h", "update", 0, 90, PARAMS, "pageable"),
        offloaded().copy("h2d", "backward", 0, 90, PARAMS, "pageable"),
    ],
)
def test_blocking_gradients__ignores_other_copies(job: Job) -> None:
    assert job.result(blocking_gradients) is None


@pytest.mark.parametrize(
    ("ranks", "checkpointing", "forwards"),
    [(1, False, 2), (1, True, 3), (4, False, 3), (4, None, 4)],
)
def test_blocking_gradients__estimates_wait_from_backward_and_forward(
    ranks: int, checkpointing: bool | None, forwards: int
) -> None:
    job = of_a_log(ranks, backward=1000)
    job.builder.meta["deepspeed"]["activation_checkpointing"] = checkpointing
    finding = job.finding(blocking_gradients)
    assert finding.potential_gain_ms == pytest.approx(1000 - 100 * forwards)
    assert "10.0 times the forward's 100.0 ms" in finding.evidence[0]
    assert "offloads the optimizer to the cpu" in finding.evidence[1]


@pytest.mark.parametrize(("backward", "reported"), [(599, False), (601, True)])
def test_blocking_gradients__needs_half_more_than_expected_time(
    backward: float, reported: bool
) -> None:
    assert (
        of_a_log(2, backward=backward).result(blocking_gradients) is not None
    ) == reported


def test_blocking_gradients__gain_excludes_time_at_link_peak() -> None:
    # 0.5 of the peak over 1000 ms: 500 ms at least, more than four forwards.
    finding = (
        of_a_log(backward=1000).sample("backward", 0.0, 0.5).finding(blocking_gradients)
    )
    assert finding.potential_gain_ms == pytest.approx(500)
    assert "50 % of the link's peak" in finding.evidence[1]
    assert "25 GB/s" in finding.evidence[1]


@pytest.mark.parametrize(("share", "reported"), [(0.66, True), (0.67, False)])
def test_blocking_gradients__is_none_if_link_is_busy(
    share: float, reported: bool
) -> None:
    # Fast forwards: four of them take 160 ms, the link needs 660 and 670 of the 1000.
    job = of_a_log(forward=40, backward=1000).sample("backward", 0.0, share)
    assert (job.result(blocking_gradients) is not None) == reported


def test_blocking_gradients__pinned_copies_may_block() -> None:
    job = offloaded(backward=1000).copy("d2h", "backward", 0, 100, PARAMS * 2)
    assert job.finding(blocking_gradients).potential_gain_ms == pytest.approx(700)


def test_blocking_gradients__infers_offload_from_bytes() -> None:
    job = on_gpu(backward=1000)
    assert job.result(blocking_gradients) is None
    job.copy("d2h", "backward", 0, 10, PARAMS - 100_000_000)
    assert job.result(blocking_gradients) is None
    job.copy("d2h", "backward", 20, 10, 200_000_000)
    assert job.finding(blocking_gradients).potential_gain_ms == pytest.approx(700)


def test_blocking_gradients__is_none_without_offload() -> None:
    job = on_gpu(backward=1000).copy("d2h", "backward", 0, 100, PARAMS * 4, "pageable")
    assert (
        job.meta(
            optimizers=[{"class": "AdamW", "params": PARAMS, "state_devices": ["cuda"]}]
        ).result(blocking_gradients)
        is None
    )
    assert on_cpu(backward=5000).result(blocking_gradients) is None
    nowhere = offloaded(ratio=0.0, backward=1000)
    assert nowhere.result(blocking_gradients) is None
    nothing = offloaded(backward=1000)
    nothing.builder.meta["deepspeed"]["config"]["zero_optimization"][
        "offload_optimizer"
    ] = {"device": "none"}
    assert nothing.result(blocking_gradients) is None


def test_copy_stats__assigns_copies_to_phase_that_begins_with_them() -> None:
    # Also if a phase without length comes before it.
    job = offloaded(forward=0).copy("d2h", "backward", 0, 50, PARAMS, "pageable")
    copies = JobMetrics(job.trace).copy_stats("d2h", "pageable", "backward")
    assert copies is not None
    assert (copies.count, copies.busy_ms) == (1, pytest.approx(50))


def test_blocking_gradients__is_none_without_forward() -> None:
    assert of_a_log(forward=0, backward=1000).result(blocking_gradients) is None
