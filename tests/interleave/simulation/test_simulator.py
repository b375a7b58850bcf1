"""Tests of the simulator: properties of every plan on every machine, and times in
closed form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import MachineError, PlanError
from ebbtide.interleave.model.plan import UPDATE, Op, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, make_plan
from ebbtide.interleave.simulation import compiled_fluid, fluid
from ebbtide.interleave.simulation.lanes import Lanes
from ebbtide.interleave.simulation.simulator import Simulator, simulate
from ebbtide.interleave.simulation.tasks import run_in_python, tasks_of
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.quick_plans import plan_quickly
from tests.interleave.simulation.independent_tasks import independent_tasks
from tests.interleave.simulation.stored_plans import cases
from tests.interleave.strategies import fixed_policies, machines, policies, workloads

quick_plans = pytest.fixture(autouse=True)(plan_quickly)
ROOT = Path(__file__).parents[3]
# Times are sums of some hundred terms.
CLOSE = 1e-9


def ran(policy: Policy | str, workload: Workload, machine: Machine) -> Schedule:
    return simulate(make_plan(policy, workload, machine), workload, machine)


def any_schedule(test: Callable[..., None]) -> Callable[..., None]:
    return settings(max_examples=examples(25, by_default=3))(
        given(policies(), workloads(), machines())(test)
    )


def reached(schedule: Schedule, point: float, overhead: float) -> float:
    """Return the earliest time at which a point of the iteration is reached, s."""
    lengths = (
        schedule.workload.other_s,
        schedule.workload.forward_s,
        schedule.workload.backward_s,
    )
    spent = sum(
        length * min(max(point - phase, 0.0), 1.0)
        for phase, length in enumerate(lengths)
    )
    return spent + (overhead if point > UPDATE else 0.0)


@settings(max_examples=examples(25, by_default=3))
@given(policies(), workloads(), machines(), st.floats(0, 2))
def test_run__gives_up_only_what_takes_longer_than_the_limit(
    policy: str, workload: Workload, machine: Machine, share: float
) -> None:
    schedule = ran(policy, workload, machine)
    simulator = Simulator(workload, machine)
    limited = simulator.run(schedule.plan, share * schedule.iteration_s)
    assert limited == schedule or (limited is None and share <= 1)
    # Nothing of a run that was given up remains.
    assert simulator.run(schedule.plan) == schedule


@any_schedule
def test_simulate__moves_the_planned_bytes(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    per_param = {
        "gradient down": workload.grad_bytes,
        "gradient up": workload.grad_bytes,
        "fetch": workload.state_bytes,
        "flush": workload.state_bytes,
        "upload": workload.param_bytes,
    }
    for direction in ("h2d", "d2h"):
        planned = sum(
            per_param[op.kind] * workload.subgroups[op.subgroup]
            for op in schedule.plan.ops
            if op.resource == direction
        )
        assert schedule.moved_bytes(direction) == pytest.approx(planned)
    assert schedule.plan.counts().get("flush", 0) == schedule.plan.counts().get(
        "fetch", 0
    )


@any_schedule
def test_simulate__gives_phases_that_sum_to_the_iteration(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = ran(policy, workload, machine)
    assert schedule.iteration_s == pytest.approx(
        max([*schedule.ends, workload.compute_s + (machine.step_overhead_s or 0)])
    )
    assert schedule.other_s == pytest.approx(workload.other_s)
    assert schedule.forward_s == pytest.approx(workload.forward_s)
    assert schedule.backward_s >= workload.backward_s * (1 - CLOSE)
    if "grads=blocking" not in policy:
        assert schedule.backward_s == pytest.approx(workload.backward_s)
    assert schedule.exposed_s == pytest.approx(
        schedule.iteration_s - workload.compute_s, abs=1e-9
    )
    assert all(0 <= share <= 1 for share in schedule.busy_shares().values())


@given(
    fixed_policies(),
    workloads(),
    machines(),
    st.sampled_from(["cpu_update", "gpu_update", "host_memory", "h2d"]),
)
def test_simulate__is_finite_for_extreme_rates(
    policy: str, workload: Workload, machine: Machine, rate: str
) -> None:
    suffix = "params_per_s" if rate.endswith("update") else "bytes_per_s"
    for value in (1.0, 1e13):
        changed: dict[str, Any] = {f"{rate}_{suffix}": value}
        schedule = ran(policy, workload, replace(machine, **changed))
        assert math.isfinite(schedule.iteration_s)
        assert all(start <= end for _, start, end in schedule.items())


# Closed forms. Plenty of host memory bandwidth unless a test says otherwise.
C, G, UP, DOWN, PAGEABLE_UP, PAGEABLE_DOWN, CAST, OVERHEAD = (
    2e9,
    50e9,
    40e9,
    30e9,
    8e9,
    3e9,
    10e9,
    0.5,
)
TEST_MACHINE = Machine(
    name="box",
    gpu_memory_bytes=80e9,
    h2d_bytes_per_s=UP,
    d2h_bytes_per_s=DOWN,
    h2d_pageable_bytes_per_s=PAGEABLE_UP,
    d2h_pageable_bytes_per_s=PAGEABLE_DOWN,
    host_memory_bytes_per_s=1e13,
    cpu_update_params_per_s=C,
    cpu_cast_params_per_s=CAST,
    gpu_update_params_per_s=G,
    step_overhead_s=OVERHEAD,
)


def even(count: int, size: int = 10**8, **values: Any) -> Workload:
    values = {"forward_s": 1.0, "backward_s": 10.0, **values}
    return Workload("even", count * size, size, **values)


@pytest.mark.parametrize(
    ("up", "down", "expected"),
    [
        (30e9, 50e9, (20 / 30, 20 / 50)),
        (30e9, 90e9, (20 / 30, 20 / 90)),
        # What one direction does not need is the other one's.
        (5e9, 50e9, (1.0, 35 / 50)),
        (50e9, 1.0, (40 / 50, 1.0)),
    ],
)
def test_lanes__a_faster_direction_takes_at_most_half_of_what_the_other_one_needs(
    up: float, down: float, expected: tuple[float, float]
) -> None:
    lanes = Lanes(replace(TEST_MACHINE, duplex_bytes_per_s=40e9))
    tasks = independent_tasks(lanes, ["h2d", "d2h"], [1e3, 1e3], [up, down])
    starts, ends, done = run_in_python(
        tasks._replace(alone_s=np.array([expected[0], 1e9])), lanes.bandwidth, 1e99
    )
    assert (starts, done) == ([0.0, 0.0], 2)
    assert ends[0] == pytest.approx(1.0)
    # Afterwards the other direction has the link alone.
    assert ends[1] - 1.0 == pytest.approx((1e9 - expected[1]) * max(1.0, down / 40e9))


@given(st.booleans().flatmap(lambda stored: cases(stored=stored)), st.booleans())
@settings(max_examples=examples(200, by_default=20))
def test_run__gives_the_same_bits_in_python_and_compiled(
    case: tuple[Plan, Workload, Machine], repeated: bool
) -> None:
    plan, workload, machine = case
    work = Simulator(workload, machine).iteration_work(plan)
    tasks, bandwidth = tasks_of([work] * (3 if repeated else 1)), work.lanes.bandwidth
    assert compiled_fluid.run(tasks, bandwidth, math.inf) == run_in_python(
        tasks, bandwidth, math.inf
    )


def test_simulate__names_a_missing_rate() -> None:
    with pytest.raises(
        MachineError,
        match=r"box has no h2d_bytes_per_s, which policy pipelined needs: .*calibrate",
    ):
        ran("pipelined", even(2), replace(TEST_MACHINE, h2d_bytes_per_s=None))
    # Rates that a plan does not use may be missing.
    ran(
        "gpu-only",
        even(2),
        replace(TEST_MACHINE, h2d_bytes_per_s=None, cpu_update_params_per_s=None),
    )


def test_simulate__refuses_operations_that_wait_for_each_other() -> None:
    ops = (
        Op("update", "gpu", 0, 1, 0.0, 3.0, (1,)),
        Op("update", "gpu", 1, 1, 0.0, 3.0, (0,)),
    )
    stuck = Plan(
        "stuck", ops, 2, frozenset({0, 1}), frozenset(), frozenset({0, 1}), 24.0
    )
    with pytest.raises(PlanError, match="wait for each other"):
        simulate(stuck, even(2, 1), TEST_MACHINE)


@pytest.mark.parametrize(
    "function",
    [fluid.share, fluid.next_end, fluid.run],
    ids=lambda function: function.__name__,
)
def test_docs__show_the_event_loop_as_it_is(function: Callable[..., Any]) -> None:
    assert inspect.getsource(function) in (ROOT / "docs" / "model.md").read_text()
