"""The wait of the backward for gradient copies, by each kind of data."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics.gradient_wait import GradientWait, gradient_wait
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.profiler.trace import Trace
from tests.analysis.findings.jobs import PARAMS, async_copies, offloaded, on_cpu, on_gpu
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job


def wait_of(trace: Trace) -> GradientWait:
    wait = gradient_wait(JobMetrics(trace))
    assert wait is not None
    return wait


def test_gradient_wait__prefers_sub_step() -> None:
    wait = wait_of(deepspeed_job().build())
    assert wait.step is not None
    assert (wait.wait_ms, wait.step.name, wait.copies, wait.explained_forwards) == (
        20,
        "gradient down",
        None,
        None,
    )


def test_gradient_wait__takes_pageable_copies() -> None:
    wait = wait_of(
        offloaded().copy("d2h", "backward", 20, 50, PARAMS * 2, "pageable").trace
    )
    assert wait.copies is not None
    assert (wait.wait_ms, wait.copies.busy_ms) == (pytest.approx(50), pytest.approx(50))
    assert (wait.step, wait.explained_forwards) == (None, None)


def test_gradient_wait__is_backward_minus_explained_forwards() -> None:
    wait = wait_of(offloaded(backward=1000).trace)
    # One rank, recomputation not known.
    assert (wait.wait_ms, wait.explained_forwards, wait.step, wait.copies) == (
        pytest.approx(700),
        3,
        None,
        None,
    )


def test_gradient_wait__is_none_without_wait() -> None:
    for job in (
        async_copies(offloaded()),
        on_gpu(backward=1000),
        on_cpu(backward=5000),
        offloaded(forward=0),
    ):
        assert gradient_wait(JobMetrics(job.trace)) is None
