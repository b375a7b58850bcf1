"""Planner: `adaptive` follows a machine that changes.

Links and the CPU's updates are throttled so much that other work on this machine hardly
matters. The tests look at rates and plans only, not at times, and allow as many steps
as other work on this machine may disturb."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from ebbtide.interleave.engine.adaptive import planner
from ebbtide.interleave.engine.adaptive.planner import Planner
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.runtime.layout import divide
from ebbtide.interleave.model.operations import BOTH
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import maker, throttle_cpu

SUBGROUP, COUNT = 4000, 6
# Rates with which a subgroup takes 32 ms on a link and 20 ms on the CPU.
LINK, CPU, GPU = 1.5e6, 0.2e6, 4e6
# Device memory for the state of three subgroups, in bytes.
ROOM = 3 * 12.0 * SUBGROUP
WITHIN = 10
# The most times that many steps, where the measured times are those of a machine with
# other work.
ROUNDS = 6


@pytest.fixture
def quick_plans() -> None:
    """Search as usual: the tests compare plans with the best ones."""


@pytest.fixture(autouse=True)
def _plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan at any time: these steps are so short that planning would have to wait for a
    thousand of them."""
    monkeypatch.setattr(planner, "_PLANNING_SHARE", math.inf)


def machine(link: float = LINK, cpu: float = CPU) -> Machine:
    return Machine(
        name="test",
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        h2d_pageable_bytes_per_s=link,
        d2h_pageable_bytes_per_s=link,
        host_memory_bytes_per_s=1e10,
        cpu_update_params_per_s=cpu,
        cpu_cast_params_per_s=1e9,
        gpu_update_params_per_s=GPU,
        step_overhead_s=0.0,
    )


class Bench:
    """An optimizer with one parameter and constant gradients, on a device and a CPU
    with given rates."""

    def __init__(
        self,
        first_machine: Machine,
        link: float = LINK,
        cpu: float = CPU,
        **options: Any,
    ) -> None:
        self.cpu = cpu
        self.device = EmulatedDevice(None, link, link, GPU)
        self.param = torch.nn.Parameter(
            torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16)
        )
        given = {
            "machine": first_machine,
            "device": self.device,
            "subgroup_params": SUBGROUP,
            "memory_budget": ROOM,
        }
        self.optimizer = maker("adaptive", "kept", **{**given, **options})([self.param])
        throttle_cpu(self.optimizer, lambda: self.cpu)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.param.grad = torch.ones_like(self.param)
            self.optimizer.step()

    def follows(self, true: Machine) -> bool:
        """Return whether rates and plan come to suit a machine."""
        for _ in range(2 * ROUNDS):
            self.steps(WITHIN // 2)
            machine = self.optimizer.machine
            near = all(
                getattr(machine, key) == pytest.approx(getattr(true, key), rel=0.5)
                for key in KEYS
            )
            if near and self.excess(true) < 0.1:
                return True
        return False

    def excess(self, true: Machine) -> float:
        """Return how much longer the current plan takes on a machine than a plan made
        for the machine, as a share."""
        workload = self.optimizer._runner.planner.workload
        best = simulate(
            make_plan("adaptive", workload, true), workload, true
        ).iteration_s
        return simulate(self.optimizer.plan, workload, true).iteration_s / best - 1


@contextmanager
def bench(first_machine: Machine, **options: Any) -> Iterator[Bench]:
    created = Bench(first_machine, **options)
    with closing(created.optimizer):
        yield created


def change(setup: Bench, link: float = LINK, cpu: float = CPU) -> Machine:
    setup.device.rates.update(h2d=link, d2h=link)
    setup.cpu = cpu
    return machine(link, cpu)


KEYS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "cpu_update_params_per_s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"link": 4 * LINK}, {"link": LINK}),
        pytest.param({"link": LINK}, {"link": 4 * LINK}, marks=pytest.mark.slow),
        pytest.param({"cpu": CPU}, {"cpu": CPU / 4}, marks=pytest.mark.slow),
    ],
)
def test_adaptive__rates_and_plan_follow_a_change_of_the_machine(
    before: dict[str, float], after: dict[str, float]
) -> None:
    with bench(machine(**before), **before) as setup:
        setup.steps(6)
        plan = setup.optimizer.plan
        true = change(setup, **after)
        assert setup.excess(true) > 0.1
        assert setup.follows(true)
        assert setup.optimizer.plan.ops != plan.ops


@pytest.mark.slow
def test_adaptive__corrects_wrong_rates() -> None:
    with bench(machine(link=5 * LINK, cpu=CPU / 3)) as setup:
        assert setup.follows(machine())


@pytest.mark.slow
def test_planner__follows_a_change_after_many_fluctuations() -> None:
    """In virtual time: the measured schedules are simulated on the true machine."""
    subgroups = divide([torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16)], SUBGROUP)
    planned = Planner(as_policy("adaptive"), machine(), subgroups, "kept")
    plan = planned.plan(ROOM)
    plans = 0

    def steps(true: Machine, count: int) -> None:
        nonlocal plan, plans
        for _ in range(count):
            planned.observe(
                simulate(
                    plan,
                    replace(planned.workload, forward_s=0.01, backward_s=0.02),
                    true,
                )
            )
            if planned.replan_reason(ROOM) is not None:
                plan = planned.plan(ROOM)
                plans += 1

    for number in range(30):
        # A fluctuation of a rate that hardly matters.
        steps(
            replace(
                machine(), gpu_update_params_per_s=GPU * (1.4 if number % 2 else 1)
            ),
            8,
        )
    # Planning is not repeated often if the plans come out the same.
    assert 3 < plans < 12
    true = machine(link=4 * LINK)
    steps(true, WITHIN)
    best = simulate(
        make_plan("adaptive", planned.workload, true), planned.workload, true
    ).iteration_s
    assert simulate(plan, planned.workload, true).iteration_s < 1.1 * best


def test_planner__spends_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that take no time do not pay for a plan, even if rates change."""
    monkeypatch.undo()
    subgroups = divide([torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16)], SUBGROUP)
    planned = Planner(as_policy("adaptive"), machine(), subgroups, "kept")
    plan = planned.plan(ROOM)
    plan_count = 0
    for number in range(30):
        true = machine(link=LINK * (4 if number % 2 else 1))
        planned.observe(
            simulate(
                plan, replace(planned.workload, forward_s=0.01, backward_s=0.02), true
            )
        )
        if planned.replan_reason(ROOM) is not None:
            plan = planned.plan(ROOM)
            plan_count += 1
    # When the phases were measured, and perhaps once more if this machine stalled
    # meanwhile.
    assert 1 <= plan_count <= 2


def test_replan_reason__is_that_more_steps_are_clipped() -> None:
    subgroups = divide([torch.zeros(SUBGROUP * COUNT)], SUBGROUP)
    planning = Planner(
        as_policy("pipelined,overlap=auto"),
        machine(),
        subgroups,
        "streamed",
        supported=BOTH,
    )
    planning.workload = replace(planning.workload, forward_s=0.1, backward_s=0.3)
    plan = planning.plan(None)
    assert plan.speculated
    for _ in range(4):
        planning.observe(simulate(plan, planning.workload, planning.machine))
    for _ in range(100):
        planning.observe_clipping(True)
    assert (
        planning.replan_reason(None)
        == "the share of clipped steps went from 0.05 to 0.99"
    )
    planning.plan(None)
    assert planning.replan_reason(None) is None


def test_replan_reason__is_that_gradients_change_after_their_copies() -> None:
    subgroups = divide([torch.zeros(SUBGROUP * COUNT)], SUBGROUP)
    planning = Planner(as_policy("zero-offload"), machine(), subgroups, "copied")
    planning.workload = replace(planning.workload, forward_s=0.1, backward_s=0.3)

    def gradient_starts() -> set[str | None]:
        plan = planning.plan(None)
        return {op.start for op in plan.ops if op.kind == "gradient down"}

    early = gradient_starts()
    for _ in range(8):
        planning.observe_copies(1.0)
    assert (
        planning.replan_reason(None)
        == "gradients change between the backward and the step"
    )
    late = gradient_starts()
    assert late != early
    assert planning.replan_reason(None) is None
    for _ in range(100):
        planning.observe_copies(None)
    reason = planning.replan_reason(None)
    assert reason == "gradients may stay the same between the backward and the step"
    assert gradient_starts() == early
    planning.observe_copies(1.0)
    assert planning.replan_reason(None) is None
