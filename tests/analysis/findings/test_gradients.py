"""Gradients that block the backward: planted, and what the rule says they are worth."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings.gradients import blocking_gradients
from ebbtide.analysis.metrics.trace_metrics import Study
from tests.analysis.findings.jobs import PARAMS, Job, async_copies, devices, offloaded, on_cpu, on_gpu


def of_a_log(ranks: int = 2, **ms: Any) -> Job:
    """A DeepSpeed job of which only times are known."""
    job = devices(Job(ranks, **ms))
    job.builder.meta["deepspeed"] = {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}
    return job


@pytest.mark.parametrize("length", [10, 120])
def test_pageable_copies_in_the_backward_are_worth_their_time(length: int) -> None:
    job = offloaded().copy("d2h", "backward", 20, length, PARAMS * 2, "pageable")
    found = job.finding(blocking_gradients)
    assert found.worth_ms == pytest.approx(length)
    assert "1 pageable" in found.evidence[0]
    assert "200.0 ms" in found.evidence[0]


def test_copies_that_overlap_are_not_counted_twice_and_the_worst_rank_counts() -> None:
    job = offloaded(2).copy("d2h", "backward", 0, 60, PARAMS, "pageable", ranks=[1])
    job.copy("d2h", "backward", 30, 50, PARAMS, "pageable", ranks=[1]).copy("d2h", "backward", 0, 7, PARAMS, "pageable")
    assert job.finding(blocking_gradients).worth_ms == pytest.approx(80)


@pytest.mark.parametrize(
    "job",
    [
        async_copies(offloaded()),
        offloaded().copy("d2h", "backward", 0, 3.9, PARAMS, "pageable"),  # 2 % of the backward are its gradients
        offloaded().copy("d2h", "update", 0, 90, PARAMS, "pageable"),
        offloaded().copy("h2d", "backward", 0, 90, PARAMS, "pageable"),
    ],
)
def test_other_copies_do_not_block_the_backward(job: Job) -> None:
    assert job.says(blocking_gradients) is None


@pytest.mark.parametrize(
    ("ranks", "checkpointing", "forwards"), [(1, False, 2), (1, True, 3), (4, False, 3), (4, None, 4)]
)
def test_without_copies_a_backward_far_longer_than_its_forward_tells(
    ranks: int, checkpointing: bool | None, forwards: int
) -> None:
    job = of_a_log(ranks, backward=1000)
    job.builder.meta["deepspeed"]["activation_checkpointing"] = checkpointing
    found = job.finding(blocking_gradients)
    assert found.worth_ms == pytest.approx(1000 - 100 * forwards)
    assert "10.0 times the forward's 100.0 ms" in found.evidence[0]
    assert "offloads the optimizer to the cpu" in found.evidence[1]


@pytest.mark.parametrize(("backward", "there"), [(599, False), (601, True)])
def test_it_takes_half_as_much_again_as_expected(backward: float, there: bool) -> None:
    assert (of_a_log(2, backward=backward).says(blocking_gradients) is not None) == there


def test_what_the_link_needs_for_the_gradients_is_not_worth_anything() -> None:
    # 0.5 of the peak over 1000 ms: 500 ms at least, more than four forwards.
    found = of_a_log(backward=1000).sample("backward", 0.0, 0.5).finding(blocking_gradients)
    assert found.worth_ms == pytest.approx(500)
    assert "50 % of the link's peak" in found.evidence[1]
    assert "25 GB/s" in found.evidence[1]


@pytest.mark.parametrize(("share", "there"), [(0.66, True), (0.67, False)])
def test_a_backward_that_fills_the_link_is_not_held_up_by_waiting(share: float, there: bool) -> None:
    # Fast forwards: four of them take 160 ms, the link needs 660 and 670 of the 1000.
    job = of_a_log(forward=40, backward=1000).sample("backward", 0.0, share)
    assert (job.says(blocking_gradients) is not None) == there


def test_pinned_copies_may_block_too() -> None:
    job = offloaded(backward=1000).copy("d2h", "backward", 0, 100, PARAMS * 2)
    assert job.finding(blocking_gradients).worth_ms == pytest.approx(700)


def test_of_a_job_that_does_not_say_where_its_state_is_the_bytes_tell() -> None:
    job = on_gpu(backward=1000)
    assert job.says(blocking_gradients) is None
    job.copy("d2h", "backward", 0, 10, PARAMS - 100_000_000)
    assert job.says(blocking_gradients) is None
    job.copy("d2h", "backward", 20, 10, 200_000_000)
    assert job.finding(blocking_gradients).worth_ms == pytest.approx(700)


def test_state_on_the_gpu_and_jobs_without_one_have_no_gradients_to_wait_for() -> None:
    job = on_gpu(backward=1000).copy("d2h", "backward", 0, 100, PARAMS * 4, "pageable")
    assert (
        job.meta(optimizers=[{"class": "AdamW", "params": PARAMS, "state_devices": ["cuda"]}]).says(blocking_gradients)
        is None
    )
    assert on_cpu(backward=5000).says(blocking_gradients) is None
    nowhere = offloaded(ratio=0.0, backward=1000)
    assert nowhere.says(blocking_gradients) is None
    nothing = offloaded(backward=1000)
    nothing.builder.meta["deepspeed"]["config"]["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    assert nothing.says(blocking_gradients) is None


def test_copies_that_begin_with_a_phase_belong_to_it() -> None:
    # Also where one of no time lies before it.
    job = offloaded(forward=0).copy("d2h", "backward", 0, 50, PARAMS, "pageable")
    copies = Study(job.trace).copies_of("d2h", "pageable", "backward")
    assert copies is not None
    assert (copies.count, copies.busy_ms) == (1, pytest.approx(50))


def test_without_a_forward_there_is_nothing_to_hold_it_against() -> None:
    assert of_a_log(forward=0, backward=1000).says(blocking_gradients) is None
