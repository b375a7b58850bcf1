"""Tests of the policies of other systems: valid plans, departures that are named, times
in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError, PolicyError
from ebbtide.interleave.model.operations import (
    CLIPPING_FIRST,
    NO_DEPARTURES,
    NO_OVERLAP,
)
from ebbtide.interleave.model.plan import FORWARD, UPDATE, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import as_policy, make_plan
from ebbtide.interleave.simulation.simulator import simulate, simulate_steps
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine
from ebbtide.machines.sheets import SHARES
from tests.conftest import examples
from tests.features.overlap.test_speculation import BOX, JOB
from tests.interleave.strategies import machines, workloads

FULL_BOX = replace(
    BOX,
    gpu_update_params_per_s=1e12,
    gpu_cast_params_per_s=1e12,
    cpu_cast_params_per_s=4e9,
    h2d_pageable_bytes_per_s=5e9,
)
NO_ROOM = replace(JOB, gpu_free=((0.0, 0.0),))
SYSTEMS = (
    "superoffload", "superoffload,rule=deepspeed", "zenflow:0.1", "zenflow:0,interval=1", "zenflow:1",
    "zenflow:0.3,rule=deepspeed", "megatron-hybrid:0", "megatron-hybrid:0.4", "megatron-hybrid:0.7,overlap=copies",
    "megatron-hybrid:1,masters=gpu", "deepcompile", "prime-rl", "torchao", "torchao,backward=compiled", "fsdp2-offload",
)  # fmt: skip


def inexact_systems(plan: Plan, workload: Workload) -> bool:
    """Return whether a system's results differ from what the workload asks for."""
    name = as_policy(plan.policy).name
    if name == "zenflow":
        return not plan.policy.startswith("zenflow:1")
    if name in ("prime-rl", "torchao"):
        # torchao keeps no masters.
        return workload.clipping or (name == "torchao" and workload.state_bytes >= 12)
    return name == "superoffload" and bool(plan.speculated)


def test_widest_overlap__is_none_for_an_overlap_of_the_system_alone() -> None:
    assert as_policy("megatron-hybrid:0.5,overlap=copies").widest_overlap == NO_OVERLAP


@settings(max_examples=examples(60, by_default=12), deadline=None)
@given(st.sampled_from(SYSTEMS), workloads(max_subgroups=8), machines())
def test_make_plan__is_valid_but_for_named_departures(
    policy: str, workload: Workload, machine: Machine
) -> None:
    plan = make_plan(policy, workload, machine)
    assert plan.validate(workload) is plan
    assert plan.is_exact is not inexact_systems(plan, workload)
    assert {op.subgroup for op in plan.ops if op.kind == "update"} == set(
        range(len(workload.subgroups))
    )
    steps = simulate_steps(plan, workload, machine)
    assert steps.mean("iteration_s") >= workload.compute_s * (1 - 1e-9)
    if plan.departures.rules:
        # No rule is left out for nothing.
        with pytest.raises(PlanError):
            replace(plan, departures=NO_DEPARTURES).validate(workload)


@pytest.mark.parametrize(
    "policy", ["prime-rl", "superoffload", "zenflow:0.1", "fsdp2-offload"]
)
@pytest.mark.parametrize("kind", ["upload", "update", "gradient down"])
def test_validate__refuses_other_faults_of_plans_with_departures(
    policy: str, kind: str
) -> None:
    plan = make_plan(policy, NO_ROOM, FULL_BOX)
    index = max(number for number, op in enumerate(plan.ops) if op.kind == kind)
    moved = plan.ops[index]._replace(subgroup=99)
    with pytest.raises(PlanError, match="does not exist"):
        replace(plan, ops=(*plan.ops[:index], moved, *plan.ops[index + 1 :])).validate(
            NO_ROOM
        )
    early = plan.ops[index]._replace(after=(len(plan.ops),))
    with pytest.raises(PlanError, match="waits for a later operation"):
        replace(plan, ops=(*plan.ops[:index], early, *plan.ops[index + 1 :])).validate(
            NO_ROOM
        )


def test_validate__keeps_gradients_and_uploads_where_only_clipping_is_left_out() -> (
    None
):
    plan = make_plan("prime-rl", NO_ROOM, FULL_BOX)
    ops = tuple(op._replace(after=()) if op.kind == "update" else op for op in plan.ops)
    with pytest.raises(PlanError, match="does not wait for gradient down"):
        replace(plan, ops=ops).validate(NO_ROOM)
    assert plan.departures.rules == {CLIPPING_FIRST}


def test_prime_rl__updates_while_gradients_arrive() -> None:
    """A gradient every 2 s, 0.2 s for its copy, 1 s for its update, 0.2 s for the
    upload of the last one."""
    schedule = simulate(make_plan("prime-rl", JOB, BOX), JOB, BOX)
    assert schedule.iteration_s == pytest.approx(12 + 0.2 + 1 + 0.2)
    assert simulate(
        make_plan("prime-rl", JOB, BOX),
        JOB,
        replace(BOX, cpu_update_params_per_s=0.25e9),
    ).iteration_s == (pytest.approx(4 + 2.2 + 4 * 4 + 0.2))


def test_torchao__uploads_follow_the_last_gradient() -> None:
    update_s = 1 / SHARES["torch_update"].value
    schedule = simulate(make_plan("torchao", JOB, BOX), JOB, BOX)
    assert schedule.iteration_s == pytest.approx(12 + 0.2 + update_s + 0.2)
    assert min(
        start for op, start, _ in schedule.items() if op.kind == "upload"
    ) == pytest.approx(12.2)
    # Gradients that come at once: 0.2 s for the first, four updates, one upload.
    # Uploads wait for all gradients.
    compiled = simulate(make_plan("torchao,backward=compiled", JOB, BOX), JOB, BOX)
    assert compiled.iteration_s == pytest.approx(12 + 0.2 + 4 * update_s + 0.2)


def test_superoffload__undoes_and_repeats_updates_that_clipping_changes() -> None:
    """In fp32 each copy takes 0.4 s. A redone step updates, undoes and updates again,
    and uploads the last one."""
    steps = simulate_steps(
        make_plan("superoffload", NO_ROOM, FULL_BOX), NO_ROOM, FULL_BOX
    )
    assert steps.redone is not None
    assert steps.valid.plan.speculated == frozenset(range(4))
    assert steps.valid.iteration_s == pytest.approx(12 + 0.4 + 1 + 0.4, abs=0.01)
    assert steps.redone.iteration_s == pytest.approx(
        12 + 0.4 + 1 + 2 * 4 + 0.4, abs=0.01
    )
    # In place: no second state on the host.
    assert steps.valid.host_bytes() == (12 + 4 + 4) * JOB.params


def test_superoffload__of_deepspeed_is_that_of_its_code() -> None:
    """With clipping: 2 B down, 2 B up and 4 B down of each gradient; at the step 0.8 of
    the cores update one subgroup after another, each converted on the CPU and copied
    from pageable memory."""
    schedule = simulate(
        make_plan("superoffload,rule=deepspeed", NO_ROOM, FULL_BOX), NO_ROOM, FULL_BOX
    )
    assert schedule.iteration_s == pytest.approx(
        12 + 0.6 + 4 * (1 / 0.8 + 0.25 + 0.4), abs=0.02
    )
    assert schedule.moved_bytes("d2h") == 6 * JOB.params
    assert schedule.moved_bytes("h2d") == 4 * JOB.params
    assert schedule.plan.is_exact
    # Without clipping updates follow their gradients, and parameters still follow the
    # step.
    unclipped = replace(NO_ROOM, clipping=False)
    early = simulate(
        make_plan("superoffload,rule=deepspeed", unclipped, FULL_BOX),
        unclipped,
        FULL_BOX,
    )
    assert 12 + 4 * 0.65 < early.iteration_s < schedule.iteration_s - 2


def test_torchao__says_that_it_keeps_no_masters() -> None:
    with_masters = make_plan("torchao", NO_ROOM, FULL_BOX)
    assert "no fp32 masters" in with_masters.departures.consequence
    assert not with_masters.is_exact
    without = replace(NO_ROOM, state_bytes=4.0, clipping=False)
    assert make_plan("torchao", without, FULL_BOX).is_exact


def test_superoffload__keeps_the_tail_of_the_backward_on_the_gpu() -> None:
    roomy = replace(JOB, gpu_free=((0.0, 2 * 14e9),))
    plan = make_plan("superoffload", roomy, FULL_BOX)
    assert plan.resident in ({0}, {0, 1})
    # The last gradients are updated at once; those before them are done by then.
    assert simulate(plan, roomy, FULL_BOX).iteration_s == pytest.approx(12, abs=0.01)


def test_zenflow__hides_updates_of_the_cpu_behind_an_interval() -> None:
    """With half of the cores 0.9 x 4 s of updates take 7.2 s, 1.8 s of each of four
    iterations."""
    schedule = simulate(make_plan("zenflow:0.1", JOB, FULL_BOX), JOB, FULL_BOX)
    assert schedule.iteration_s == pytest.approx(12 + 0.18, abs=0.01)
    slow = replace(FULL_BOX, cpu_update_params_per_s=0.1e9)
    assert simulate(
        make_plan("zenflow:0.1", JOB, slow), JOB, slow
    ).iteration_s == pytest.approx(18, rel=0.02)
    # 1.13 times the bytes of the model a step, as published, instead of 2.
    moved = schedule.moved_bytes("d2h") + schedule.moved_bytes("h2d")
    assert moved / (2 * JOB.params) == pytest.approx(0.9 * (1 + 1 / 4))


def test_megatron_hybrid__overlaps_copies_only_if_asked_to() -> None:
    update_s = 1 / SHARES["torch_update"].value

    def iteration(policy: str) -> float:
        plan = make_plan(f"{policy},threads=all", JOB, FULL_BOX)
        return simulate(plan, JOB, FULL_BOX).iteration_s

    assert iteration("megatron-hybrid:1") == pytest.approx(
        12 + 4 * 0.4 + 4 * update_s + 4 * 0.4, abs=0.02
    )
    assert iteration("megatron-hybrid:1,overlap=copies") == pytest.approx(
        12 + 0.4 + 4 * update_s + 0.4, abs=0.02
    )
    assert iteration("megatron-hybrid:0.26") == pytest.approx(
        12 + 2 * 0.4 + 2 * update_s + 2 * 0.4, abs=0.02
    )
    plan = make_plan("megatron-hybrid:0.5", JOB, FULL_BOX)
    assert plan.resident == {2, 3}
    masters = make_plan("megatron-hybrid:0.5,masters=gpu", JOB, FULL_BOX)
    assert masters.resident_bytes - plan.resident_bytes == 4 * 2e9


@pytest.mark.parametrize(
    ("policy", "measured_s"),
    [
        ("megatron-hybrid:0.5", 0.435),
        ("megatron-hybrid:0.5,overlap=copies", 0.464),
        ("megatron-hybrid:1,overlap=copies", 0.926),
    ],
)
def test_megatron_hybrid__on_one_thread_takes_as_long_as_measured(
    policy: str, measured_s: float
) -> None:
    """Qwen3-0.6B on an H100: the time of a step beyond that without offload
    (github.com/NVIDIA-NeMo/RL/pull/3628). Ray gives a worker one thread."""
    machine = preset("h100-80gb").for_ranks(1)
    job = replace(JOB, params=596_049_920, subgroup_params=20_000_000, sizes=None)
    steps = [
        simulate(make_plan(one, job, machine), job, machine).iteration_s
        for one in (policy, "gpu-only", f"{policy},threads=all")
    ]
    assert steps[0] - steps[1] == pytest.approx(measured_s, rel=0.25)
    assert steps[2] - steps[1] < 0.6 * measured_s


def test_deepcompile__keeps_what_fits_and_fetches_the_rest_as_the_backward_frees_memory() -> (
    None
):
    """State of 12 GB a subgroup: one stays; the backward frees memory for one more at 8
    s, for all at 12 s."""
    job = replace(JOB, gpu_free=((0.0, 15e9), (8.0, 30e9), (12.0, 80e9)))
    plan = make_plan("deepcompile", job, FULL_BOX)
    assert plan.resident == {3}
    assert plan.parked == {0, 1, 2}
    assert {op.start for op in plan.ops if op.kind == "flush"} == {FORWARD}
    fetches = {op.subgroup: op.start for op in plan.ops if op.kind == "fetch"}
    assert fetches == {0: 2.5, 1: UPDATE, 2: UPDATE}
    # A fifth of the device is not used.
    margin = make_plan("deepcompile", job, replace(FULL_BOX, gpu_memory_bytes=50e9))
    assert margin.resident == frozenset()
    with pytest.raises(PolicyError, match="what device memory is free"):
        make_plan("deepcompile", JOB, FULL_BOX)


def test_fsdp2_offload__copies_parameters_twice_and_lets_the_forward_wait() -> None:
    plan = make_plan("fsdp2-offload,threads=all", JOB, BOX)
    schedule = simulate(plan, JOB, BOX)
    assert schedule.moved_bytes("h2d") == 8 * JOB.params
    assert schedule.moved_bytes("d2h") == 4 * JOB.params
    # The last gradient takes 0.4 s; the uploads follow the updates, the last within the
    # forward.
    updates_s = 4 / SHARES["torch_update"].value
    assert schedule.iteration_s == pytest.approx(12 + 0.4 + updates_s, abs=0.01)
    assert schedule.plan.is_exact
