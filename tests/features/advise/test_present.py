"""Advice ranks plans by their rating: one whose iterations do not settle is never
advised where another settles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.features.advise import choice
from ebbtide.features.advise.present import Present
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.machine import Machine
from tests.interleave.job_files import machine, workload


def steps_of(policy: str) -> Steps:
    return simulate_steps(
        make_plan(policy, workload(), machine()), workload(), machine()
    )


def unsettled(steps: Steps) -> Steps:
    return replace(steps, valid=replace(steps.valid, settles=False))


def test_present__is_not_slower_than_a_plan_that_does_not_settle() -> None:
    slow, fast = steps_of("zero-offload"), steps_of("adaptive")
    compared = Present(slow).gain(fast)
    assert compared.is_enough
    assert compared.iteration_ms == fast.iteration_s * 1e3
    assert not Present(slow).gain(unsettled(fast)).is_enough
    # A job that does not settle takes the mean of its iterations.
    assert not Present(unsettled(fast)).is_slower_than(slow)
    assert Present(unsettled(slow)).is_slower_than(fast)


def test_choose_policy__prefers_a_plan_that_settles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def simulate(plan: Plan, job: Workload, rates: Machine) -> Steps:
        steps = simulate_steps(plan, job, rates)
        return unsettled(steps) if plan.policy.startswith("adaptive") else steps

    monkeypatch.setattr(choice, "simulate_steps", simulate)
    chosen = choice.choose_policy(workload(), machine())
    assert chosen.steps.settles
    settled = [steps for steps in chosen.others if steps.settles]
    assert settled
    assert chosen.best.rating_s <= min(steps.rating_s for steps in settled)
    assert [steps.plan.policy for steps in chosen.others if not steps.settles] == [
        "adaptive"
    ]
