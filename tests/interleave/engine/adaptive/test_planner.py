"""`adaptive` follows a machine that changes under it. Links and the CPU's updates are throttled to so little that what
else this machine does hardly matters; only rates and plans are looked at, no time."""

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
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.engine.jobs import closing
from tests.interleave.engine.training import maker, throttle_cpu

SUBGROUP, COUNT = 4000, 6
# Of a subgroup, 32 ms on a link and 20 ms on the CPU.
LINK, CPU, GPU = 1.5e6, 0.2e6, 4e6
# Of three subgroups.
ROOM = 3 * 12.0 * SUBGROUP
WITHIN = 10


@pytest.fixture(autouse=True)
def _plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """These steps are so short that planning would have to wait for a thousand of them."""
    monkeypatch.setattr(planner, "_PLANNING", math.inf)


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
    """One parameter, whose gradient is what it is; a device and a CPU as slow as they are told to be."""

    def __init__(self, told: Machine, link: float = LINK, cpu: float = CPU, **more: Any) -> None:
        self.cpu = cpu
        self.device = EmulatedDevice(None, link, link, GPU)
        self.param = torch.nn.Parameter(torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16))
        given = {"machine": told, "device": self.device, "subgroup_params": SUBGROUP, "memory_budget": ROOM}
        self.optimizer = maker("adaptive", "kept", **{**given, **more})([self.param])
        throttle_cpu(self.optimizer, lambda: self.cpu)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.param.grad = torch.ones_like(self.param)
            self.optimizer.step()

    def excess(self, true: Machine) -> float:
        """How much longer its plan takes on such a machine than the plan that is made for it, as a share."""
        workload = self.optimizer._driver.planner.workload
        best = simulate(make_plan("adaptive", workload, true), workload, true).iteration_s
        return simulate(self.optimizer.plan, workload, true).iteration_s / best - 1


@contextmanager
def bench(told: Machine, **more: Any) -> Iterator[Bench]:
    found = Bench(told, **more)
    with closing(found.optimizer):
        yield found


def changed(of: Bench, link: float = LINK, cpu: float = CPU) -> Machine:
    of.device.rates.update(h2d=link, d2h=link)
    of.cpu = cpu
    return machine(link, cpu)


KEYS = ("h2d_bytes_per_s", "d2h_bytes_per_s", "cpu_update_params_per_s")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"link": 4 * LINK}, {"link": LINK}),
        ({"link": LINK}, {"link": 4 * LINK}),
        ({"cpu": CPU}, {"cpu": CPU / 4}),
    ],
)
def test_rates_and_plan_follow_a_change(before: dict[str, float], after: dict[str, float]) -> None:
    with bench(machine(**before), **before) as of:
        of.steps(6)
        plan = of.optimizer.plan
        true = changed(of, **after)
        assert of.excess(true) > 0.1
        of.steps(WITHIN)
        for key in KEYS:
            assert getattr(of.optimizer.machine, key) == pytest.approx(getattr(true, key), rel=0.5), key
        assert of.optimizer.plan.ops != plan.ops
        assert of.excess(true) < 0.1


def test_wrong_rates_are_corrected() -> None:
    with bench(machine(link=5 * LINK, cpu=CPU / 3)) as of:
        of.steps(2 * WITHIN)
        assert of.excess(machine()) < 0.1


def test_a_planner_that_has_seen_much_wavering_still_follows_a_change() -> None:
    """In virtual time: what the simulator says of the true machine is what is measured."""
    subgroups = divide([torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16)], SUBGROUP)
    planned = Planner("adaptive", machine(), subgroups, False)
    plan = planned.plan(ROOM)
    plans = 0

    def steps(true: Machine, count: int) -> None:
        nonlocal plan, plans
        for _ in range(count):
            planned.observe(simulate(plan, replace(planned.workload, forward_s=0.01, backward_s=0.02), true))
            if planned.drifted(ROOM) is not None:
                plan = planned.plan(ROOM)
                plans += 1

    for number in range(30):
        # Which hardly matters.
        steps(replace(machine(), gpu_update_params_per_s=GPU * (1.4 if number % 2 else 1)), 8)
    # Not again and again where nothing comes of it.
    assert 3 < plans < 12
    true = machine(link=4 * LINK)
    steps(true, WITHIN)
    best = simulate(make_plan("adaptive", planned.workload, true), planned.workload, true).iteration_s
    assert simulate(plan, planned.workload, true).iteration_s < 1.1 * best


def test_planning_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of no time at all do not pay for a plan, whatever they show."""
    monkeypatch.undo()
    subgroups = divide([torch.zeros(COUNT * SUBGROUP, dtype=torch.bfloat16)], SUBGROUP)
    planned = Planner("adaptive", machine(), subgroups, False)
    plan = planned.plan(ROOM)
    asked = 0
    for number in range(30):
        true = machine(link=LINK * (4 if number % 2 else 1))
        planned.observe(simulate(plan, replace(planned.workload, forward_s=0.01, backward_s=0.02), true))
        if planned.drifted(ROOM) is not None:
            plan = planned.plan(ROOM)
            asked += 1
    # When the phases were known, and perhaps once more on a machine that stood still meanwhile.
    assert 1 <= asked <= 2
