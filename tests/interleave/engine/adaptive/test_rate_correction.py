"""correct_rates: rates come to be those with which the simulation takes the measured
times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbtide.features.storage.kinds import path_of
from ebbtide.interleave.engine.adaptive import planner
from ebbtide.interleave.engine.adaptive.planner import Planner
from ebbtide.interleave.engine.adaptive.rates import correct_rates
from ebbtide.interleave.engine.runtime.layout import divide
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine, StoragePath
from tests.conftest import examples

GB = 1e9
# Two drives: one with the same bandwidth in both directions together, and one with a
# limit of its own.
MACHINE = Machine(
    name="two drives",
    host_memory_bytes=9 * GB,
    h2d_bytes_per_s=20 * GB,
    d2h_bytes_per_s=20 * GB,
    host_memory_bytes_per_s=100 * GB,
    cpu_update_params_per_s=1 * GB,
    gpu_update_params_per_s=20 * GB,
    storage=(
        StoragePath(3 * GB, 2 * GB),
        StoragePath(2 * GB, 2 * GB, duplex_bytes_per_s=2.5 * GB),
    ),
)
JOB = Workload(
    "job", 10**9, 10**8, forward_s=1.0, backward_s=2.0, gpu_free=((0.0, 0.0),)
)
FACTORS = st.floats(0.2, 5.0)


def changed(machine: Machine, factors: list[float]) -> Machine:
    """Return a machine with other rates of its drives; the duplex limit changes as
    reads and writes of its drive do."""
    first, second = machine.storage
    return replace(
        machine,
        storage=(
            replace(
                first,
                read_bytes_per_s=first.read_bytes_per_s * factors[0],
                write_bytes_per_s=first.write_bytes_per_s * factors[1],
            ),
            replace(
                second,
                read_bytes_per_s=second.read_bytes_per_s * factors[2],
                write_bytes_per_s=second.write_bytes_per_s * factors[2],
                duplex_bytes_per_s=(second.duplex_bytes_per_s or 0.0) * factors[2],
            ),
        ),
    )


# The second drive reads and writes alone for a part of the time, and in both directions
# for the rest.
@example([0.546875, 5.0, 2.125])
@given(st.lists(FACTORS, min_size=3, max_size=3))
@settings(max_examples=examples(8, by_default=4))
def test_correct_rates__reaches_those_of_the_drives(factors: list[float]) -> None:
    plan = make_plan("pipelined", JOB, MACHINE)
    assert {path_of(op) for op in plan.ops if op.kind == "read"} == {0, 1}
    true = changed(MACHINE, factors)
    machine = MACHINE
    for _ in range(40):
        machine = correct_rates(machine, simulate(plan, JOB, true))
    for path, expected in zip(machine.storage, true.storage, strict=True):
        assert path.read_bytes_per_s == pytest.approx(
            expected.read_bytes_per_s, rel=0.02
        )
        assert path.write_bytes_per_s == pytest.approx(
            expected.write_bytes_per_s, rel=0.02
        )
    assert machine.storage[1].duplex_bytes_per_s == pytest.approx(
        true.storage[1].duplex_bytes_per_s, rel=0.02
    )
    assert machine.storage[0].duplex_bytes_per_s is None
    assert machine.h2d_bytes_per_s == pytest.approx(MACHINE.h2d_bytes_per_s, rel=0.02)


# The first limit slows reads down that are alone, too; the second only those beside
# writes.
@pytest.mark.parametrize("rate", [1 * GB, 3 * GB])
def test_correct_rates__changes_the_limit_of_both_directions_that_binds(
    rate: float,
) -> None:
    job = replace(JOB, backward_s=0.0, forward_s=0.0)
    path = StoragePath(2 * GB, 2 * GB, duplex_bytes_per_s=4 * GB)
    machine = replace(MACHINE, storage=(path,))
    true = replace(machine, storage=(replace(path, duplex_bytes_per_s=rate),))
    plan = make_plan("pipelined", job, machine)
    measured = simulate(plan, job, true)
    for _ in range(40):
        machine = correct_rates(machine, measured)
    assert simulate(plan, job, machine).iteration_s == pytest.approx(
        measured.iteration_s, rel=1e-3
    )


def test_planner__moves_state_from_a_drive_that_has_become_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "_PLANNING_SHARE", math.inf)
    subgroups = divide([torch.zeros(8000, dtype=torch.bfloat16)], 1000)
    same = replace(
        MACHINE, host_memory_bytes=80e3, storage=2 * (StoragePath(2e6, 2e6),)
    )
    planning = Planner(as_policy("adaptive"), same, subgroups, "streamed")
    planning.workload = replace(planning.workload, forward_s=0.01, backward_s=0.02)
    plan = planning.plan(0.0)
    assert reads(plan) == [4, 4]
    slow = replace(same, storage=(StoragePath(0.2e6, 2e6), same.storage[1]))
    reasons = []
    for _ in range(12):
        planning.observe(simulate(plan, planning.workload, slow))
        reason = planning.replan_reason(0.0)
        if reason is not None:
            reasons.append(reason)
            plan = planning.plan(0.0)
    assert any(
        reason.startswith("storage[0].read_bytes_per_s went from 2e+06 to")
        for reason in reasons
    )
    first, second = reads(plan)
    assert first < second
    best = simulate(
        make_plan("adaptive", planning.workload, slow), planning.workload, slow
    ).iteration_s
    assert simulate(plan, planning.workload, slow).iteration_s < 1.1 * best


def reads(plan: Plan) -> list[int]:
    return [
        sum(op.kind == "read" and path_of(op) == path for op in plan.ops)
        for path in range(2)
    ]
