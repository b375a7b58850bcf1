"""Tests of plans whose operations end in the next iteration: times in closed form, and
properties of every plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.interleave.model.operations import Hold
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.interleave.strategies import machines, workloads

late_policies = st.sampled_from(
    ["pipelined", "interleaved:1", "interleaved:2", "interleaved:3@0.5"]
)

# Four subgroups of 1 G parameters: 1 s of update, 0.2 s of upload and of gradient copy
# each.
JOB = Workload(
    name="four",
    params=4_000_000_000,
    subgroup_params=1_000_000_000,
    forward_s=4.0,
    backward_s=8.0,
)
BOX = Machine(
    h2d_bytes_per_s=10e9, d2h_bytes_per_s=10e9, host_memory_bytes_per_s=1e13, cpu_update_params_per_s=1e9,
    gpu_update_params_per_s=100e9, step_overhead_s=0.0,
)  # fmt: skip


def ran(policy: str, workload: Workload, machine: Machine) -> Schedule:
    return simulate(
        make_plan(f"{policy},overlap=forward", workload, machine), workload, machine
    )


@given(late_policies, workloads(), machines())
def test_simulate__never_makes_an_iteration_longer_by_late_updates(
    policy: str, workload: Workload, machine: Machine
) -> None:
    late, synchronous = ran(policy, workload, machine), simulate(
        make_plan(policy, workload, machine), workload, machine
    )  # fmt: skip
    # Copies that share the link with the job's collectives may take longer in the next
    # iteration.
    assume(not workload.collective_bytes)
    assert late.iteration_s <= synchronous.iteration_s * (1 + 1e-9)
    assert late.iteration_s >= workload.compute_s * (1 - 1e-9)


@given(late_policies, workloads(), machines())
def test_device_memory_line__repeats_with_the_iteration(
    policy: str, workload: Workload, machine: Machine
) -> None:
    """The line that follows from three iterations in a row, in the middle one."""
    schedule = ran(policy, workload, machine)
    assume(not schedule.plan.kept_gradients)
    length = schedule.iteration_s
    times, used = schedule.device_memory_line()
    changes = [
        (time + number * length, size)
        for number in range(-3, 2)
        for op, start, end in schedule.items()
        for time, size in ((start, op.takes), (end, -op.gives))
    ]
    for time, size in zip(times, used, strict=True):
        moment = time + 1e-12 * length
        expected = schedule.plan.resident_bytes + math.fsum(
            change for at, change in changes if at <= moment
        )
        assert size == pytest.approx(
            expected, abs=1.0 + 1e-6 * abs(expected)
        ) or _near_change(changes, time, length)


def _near_change(
    changes: list[tuple[float, float]], time: float, length: float
) -> bool:
    return any(size and 0 < abs(at - time) < 1e-9 * length for at, size in changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"holds": Hold(FORWARD + 0.9, is_next=True)},
            "is due at point 1.9, which must be from 1.0 to 1.0",
        ),
        ({"holds": Hold(UPDATE, is_next=True)}, "is due at point 3.0"),
        ({"holds": None}, "waits for a late operation and is not late"),
        ({"kind": "gradient down", "resource": "d2h"}, "finds no grad@job"),
    ],
)
def test_validate__refuses_late_operations_that_the_next_iteration_needs_sooner(
    change: dict[str, object], message: str
) -> None:
    plan = make_plan("pipelined,overlap=forward", JOB, BOX)
    ops = list(plan.ops)
    upload = next(
        index
        for index, op in enumerate(ops)
        if op.kind == "upload" and op.subgroup == 0
    )
    ops[upload] = ops[upload]._replace(**change)
    with pytest.raises(PlanError, match=message):
        replace(plan, ops=tuple(ops)).validate(JOB)


def test_validate__refuses_a_late_gradient_copy() -> None:
    plan = make_plan("pipelined,overlap=forward", JOB, BOX)
    every = [
        op._replace(holds=Hold(BACKWARD, is_next=True))
        if op.kind in ("gradient down", "clip")
        else op
        for op in plan.ops
    ]
    with pytest.raises(PlanError, match="gradient down of subgroup 3 cannot be late"):
        replace(plan, ops=tuple(every)).validate(JOB)
