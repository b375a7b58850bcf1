"""Tests of the gain of each mechanism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.replay import AblationStep, explain
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.job_files import machine, workload
from tests.interleave.strategies import machines, workloads

OVERLAPPED = ["adaptive,overlap=forward", "adaptive,overlap=both"]
LADDER = [
    "zero-offload,grads=blocking",
    "zero-offload",
    "pipelined",
    "interleaved:2",
    "adaptive",
    "adaptive",
    *OVERLAPPED,
]


@cache
def explained() -> list[AblationStep]:
    """Return the gains of a job with few subgroups."""
    return explain(workload(subgroup_params=7e8), machine())


def ran(policy: str, job: Workload, target: Machine) -> Schedule:
    return simulate(make_plan(policy, job, target), job, target)


@settings(max_examples=examples(10, by_default=5))
@given(workloads(max_subgroups=6, free_known=False), machines())
def test_explain__gains_add_up_to_the_whole(job: Workload, target: Machine) -> None:
    steps = explain(job, target)
    assert steps[0].gain_ms == 0
    total = steps[0].iteration_ms - steps[-1].iteration_ms
    assert sum(step.gain_ms for step in steps) == pytest.approx(
        total, abs=1e-9 * steps[0].iteration_ms
    )
    # Without known free memory the ladder ends before shares and windows.
    assert [step.policy for step in steps] == LADDER[:4]
    for step in steps:
        assert step.iteration_ms == ran(step.policy, job, target).iteration_s * 1e3


@pytest.mark.slow
def test_explain__adds_windows_after_memory_that_is_always_free() -> None:
    job, target = workload(), machine()
    steps = explain(job, target)
    assert [step.policy for step in steps] == LADDER
    assert len({step.mechanism for step in steps}) == len(steps)
    always = replace(job, gpu_free=((0.0, 6e9),))
    assert steps[4].iteration_ms == ran("adaptive", always, target).iteration_s * 1e3
    assert steps[5].iteration_ms == ran("adaptive", job, target).iteration_s * 1e3
    total = steps[0].iteration_ms - steps[-1].iteration_ms
    assert sum(step.gain_ms for step in steps) == pytest.approx(total)
    # If as much memory is free all the time, there is no window.
    assert explain(always, target)[:5] == steps[:5]


def test_explain__ends_with_late_and_speculative_updates() -> None:
    job = workload(subgroup_params=7e8)
    steps = {step.policy: step for step in explained()}
    assert all(steps[policy].gain_ms > 0 for policy in OVERLAPPED)
    without_clipping = explain(replace(job, clipping=False), machine())
    assert [step.policy for step in without_clipping][-1] == OVERLAPPED[0]


def test_explain__leaves_out_steps_that_lack_a_rate() -> None:
    job = workload(subgroup_params=7e8)
    without = explain(job, machine(d2h_pageable_bytes_per_s=None))
    assert [step.policy for step in without] == LADDER[1:]
    assert without[0].gain_ms == 0
    assert without[1:] == explained()[2:]
    assert explain(job, Machine()) == []


@pytest.mark.slow
def test_explain__leaves_out_updates_on_the_gpu_if_their_rate_is_not_known() -> None:
    on_cpu = explain(
        workload(subgroup_params=7e8), machine(gpu_update_params_per_s=None)
    )
    assert [step.policy for step in on_cpu] == [*LADDER[:3], *LADDER[4:]]
