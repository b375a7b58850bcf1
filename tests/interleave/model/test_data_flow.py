"""The check of plans against runs on symbols: plans are valid whose results are right
in every order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.interleave.model.plan import FORWARD, STEP, UPDATE, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import PlanBuilder, make_plan
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.engine.plans import plans, workload_of
from tests.interleave.model.symbolic_runs import (
    SymbolicRuns,
    assert_refused_where_results_are_wrong,
    is_refused,
)
from tests.interleave.model.test_plan import PLANS, each_plan
from tests.interleave.strategies import machines, policies, workloads

SEEDS = st.integers(0, 2**32)


@given(
    st.data(),
    st.lists(st.integers(1, 900), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
@settings(max_examples=examples(300, by_default=20))
def test_validate__refuses_a_random_plan_with_a_wait_less_where_results_may_be_wrong(
    data: st.DataObject, sizes: list[int], clipping: bool, until_step: bool, seed: int
) -> None:
    workload = workload_of(sizes, clipping, until_step)
    assert_refused_where_results_are_wrong(
        data.draw(plans(workload)), workload, random.Random(seed), 4
    )


@given(policies(), workloads(max_subgroups=6), machines(), SEEDS)
@settings(max_examples=examples(200, by_default=10))
def test_validate__refuses_a_plan_of_a_policy_with_a_wait_less_where_results_may_be_wrong(
    policy: str, workload: Workload, machine: Machine, seed: int
) -> None:
    plan = make_plan(policy, workload, machine)
    assert_refused_where_results_are_wrong(plan, workload, random.Random(seed), 4)


@each_plan
def test_validate__refuses_a_missing_dependency(name: str) -> None:
    """Each of these plans has such that no result needs: on a free buffer, or on what
    another one waits for, too."""
    plan, workload = PLANS[name]
    assert_refused_where_results_are_wrong(plan, workload, random.Random(0), 1000)


def _fewer(plan: Plan, kind: str, input_kind: str) -> Plan:
    """Return a plan whose first operation of a kind waits for none of another kind."""
    index = next(index for index, op in enumerate(plan.ops) if op.kind == kind)
    op = plan.ops[index]
    fewer = op._replace(
        after=tuple(
            before for before in op.after if plan.ops[before].kind != input_kind
        )
    )
    assert fewer != op
    return replace(plan, ops=(*plan.ops[:index], fewer, *plan.ops[index + 1 :]))


@pytest.mark.parametrize(
    ("kind", "input_kind"),
    [
        # Clipping waits for all gradients.
        ("gradient up", "gradient down"),
        # The gradient comes back when it is clipped.
        ("update", "clip"),
    ],
)
def test_validate__accepts_a_wait_by_way_of_others(kind: str, input_kind: str) -> None:
    workload = workload_of([500, 500], True, False)
    builder = PlanBuilder("both", workload)
    builder.gradients()
    builder.through_gpu(0)
    builder.on_cpu(1)
    plan = _fewer(builder.plan(), kind, input_kind)
    assert not is_refused(plan, workload)
    assert next(SymbolicRuns(plan, workload).problems(), None) is None


def test_validate__does_not_count_on_compute_to_wait() -> None:
    """Copies of gradients stop the backward, so each ends before the step. The engine's
    executor knows no such stop."""
    workload = workload_of([500, 500], False, False)
    plan = make_plan("zero-offload,grads=blocking", workload, MACHINE)
    plan = _fewer(plan, "update", "gradient down")
    assert is_refused(plan, workload)
    assert next(SymbolicRuns(plan, workload).problems(), None)
    assert (
        next(SymbolicRuns(plan, workload, compute_waits=True).problems(), None) is None
    )


MACHINE = Machine(
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=10e9,
    h2d_pageable_bytes_per_s=5e9,
    d2h_pageable_bytes_per_s=5e9,
    host_memory_bytes_per_s=200e9,
    cpu_update_params_per_s=2e9,
    cpu_cast_params_per_s=4e9,
    gpu_update_params_per_s=50e9,
)


def _parked_on_cpu(fetch_after_update: bool) -> Plan:
    """Return a plan that updates parked state on the CPU, and fetches it after that or
    at any time."""
    builder = PlanBuilder("parked", workload_of([500], False, False))
    builder.leave([0], FORWARD)
    builder.gradients()
    update = builder.update_on_cpu(0, (builder.leaving(0),))
    builder.add("upload", "h2d", 0, 2.0, (update,))
    builder.fetch(0, (update,) if fetch_after_update else ())
    return builder.plan(validate=False)


def test_validate__refuses_to_return_parked_state_before_its_update() -> None:
    workload = workload_of([500], False, False)
    assert not is_refused(_parked_on_cpu(True), workload)
    with pytest.raises(
        PlanError, match="fetch of subgroup 0 does not wait for update of subgroup 0"
    ):
        _parked_on_cpu(False).validate(workload)
    assert next(SymbolicRuns(_parked_on_cpu(False), workload).problems(), None)


def test_validate__refuses_a_second_update_of_state_that_has_come_back() -> None:
    workload = workload_of([500], False, False)
    builder = PlanBuilder("twice", workload)
    builder.gradients()
    builder.on_cpu(0, after=(builder.through_gpu(0),))
    with pytest.raises(PlanError, match="update of subgroup 0 is the second update"):
        builder.plan()


def test_validate__refuses_to_copy_a_gradient_while_it_is_clipped() -> None:
    workload = workload_of([500], True, False)
    builder = PlanBuilder("early", workload)
    builder.gradients_at_step(frozenset(), 2.0)
    builder.on_cpu(0)
    plan = builder.plan()
    with pytest.raises(
        PlanError, match="gradient down of subgroup 0 does not wait for clip"
    ):
        _fewer(plan, "gradient down", "clip").validate(workload)


def test_validate__counts_the_points_of_what_an_operation_waits_for() -> None:
    """An update on the GPU may be issued before its gradient is there if it waits for
    clipping."""
    workload = workload_of([500], True, False)
    plan = make_plan("gpu-only", replace(workload, gpu_free=((0.0, 1e9),)), MACHINE)

    def starting_at(update: float, clip: float) -> Plan:
        points = {"update": update, "clip": clip}
        return replace(
            plan, ops=tuple(op._replace(start=points[op.kind]) for op in plan.ops)
        )

    assert not is_refused(starting_at(FORWARD, UPDATE), workload)
    with pytest.raises(
        PlanError, match="clip starts before the gradient of subgroup 0 is ready"
    ):
        starting_at(STEP, FORWARD).validate(workload)
