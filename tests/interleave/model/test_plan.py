"""Tests of plans: every policy makes valid ones, and every broken plan is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.interleave.model.plan import OTHER, UPDATE, Op, Plan, point_at
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.policies.search.placement_search import Placement
from ebbtide.interleave.policies.search.plan_costs import PlanCosts
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even
from tests.interleave.strategies import machines, policies, workloads


@settings(max_examples=examples(25, by_default=4))
@given(policies(), workloads(), machines())
def test_make_plan__is_valid_for_every_policy(
    policy: str, workload: Workload, machine: Machine
) -> None:
    plan = make_plan(policy, workload, machine)
    assert plan.validate(workload) is plan
    assert plan.policy == policy
    assert plan.subgroups == len(workload.subgroups)
    where = {op.subgroup: op.resource for op in plan.ops if op.kind == "update"}
    assert set(where) == set(range(plan.subgroups))
    assert all(
        where[subgroup] == "gpu"
        for subgroup in plan.resident | plan.kept_gradients | plan.parked
    )
    assert plan.resident_bytes == pytest.approx(
        workload.state_bytes
        * sum(workload.subgroups[subgroup] for subgroup in plan.resident)
    )


def test_make_plan__works_for_one_subgroup_and_for_thousands() -> None:
    for policy in [
        "zero-offload",
        "twin-flow:0.37",
        "pipelined",
        "interleaved:3@0.9",
        "gpu-only",
    ]:
        for count in [1, 2, 5000]:
            plan = make_plan(policy, even(count), TEST_MACHINE)
            updates = plan.counts()
            assert (
                updates.get("update on cpu", 0) + updates.get("update on gpu", 0)
                == count
            )


def windows(clipping: bool = True) -> Workload:
    return even(8, gpu_free=((0.0, 1e12),), clipping=clipping)


# Plans with every kind of state: resident, parked, streamed across the end of the
# iteration and within the update, and on the CPU.
PLACEMENT = Placement(
    resident=1, moved=5, slots=4, early=4, late=3, round_trip_gradients=1
)


def placed(workload: Workload) -> Plan:
    """Return the plan of `adaptive` with that placement."""
    assignment = PLACEMENT.assignment(workload, range(len(workload.subgroups)))
    return PlanCosts(workload, TEST_MACHINE, "adaptive", max_ops=0).plan(assignment)


PLANS = {
    "adaptive": (placed(windows()), windows()),
    "adaptive, no clipping": (placed(windows(False)), windows(False)),
    "interleaved": (make_plan("interleaved:2@0.8", windows(), TEST_MACHINE), windows()),
    "interleaved, no room": (
        make_plan("interleaved:2", even(6, gpu_free=((0.0, 0.0),)), TEST_MACHINE),
        even(6),
    ),
    "zero-offload": (make_plan("zero-offload", windows(), TEST_MACHINE), windows()),
}


def test_plans_of_these_tests__have_all_kinds_of_operations() -> None:
    kinds = {op.kind for plan, _ in PLANS.values() for op in plan.ops}
    assert kinds == {
        "gradient down",
        "gradient up",
        "clip",
        "fetch",
        "update",
        "flush",
        "cast",
        "upload",
    }
    plan = PLANS["adaptive"][0]
    assert plan.resident
    assert len(plan.parked) == PLACEMENT.late


def refused(name: str, ops: Iterable[Op], message: str | None = None) -> None:
    plan, workload = PLANS[name]
    with pytest.raises(PlanError, match=message):
        replace(plan, ops=tuple(ops)).validate(workload)


each_plan = pytest.mark.parametrize("name", PLANS)


@each_plan
def test_validate__refuses_a_missing_operation(name: str) -> None:
    """Except a cast: an update may write half precision itself."""
    plan, _ = PLANS[name]
    for removed in range(len(plan.ops)):
        if plan.ops[removed].kind == "cast":
            continue
        refused(name, without(plan.ops, removed))


def without(ops: tuple[Op, ...], removed: int) -> list[Op]:
    """Remove an operation; its successors wait for its inputs instead."""

    def renumbered(after: tuple[int, ...]) -> tuple[int, ...]:
        kept = {index for index in after if index != removed}
        inherited = set(ops[removed].after) if removed in after else set()
        return tuple(sorted(index - (index > removed) for index in kept | inherited))

    return [
        op._replace(after=renumbered(op.after))
        for index, op in enumerate(ops)
        if index != removed
    ]


@each_plan
def test_validate__refuses_a_repeated_operation(name: str) -> None:
    plan, _ = PLANS[name]
    for op in plan.ops:
        again = op._replace(takes=0.0, gives=0.0)
        refused(
            name,
            [*plan.ops, again],
            "finds no|is repeated|is the second update|does not wait for",
        )


@each_plan
def test_validate__refuses_an_operation_before_its_inputs(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        for early in op.after:
            swapped = list(plan.ops)
            swapped[index], swapped[early] = swapped[early], swapped[index]
            refused(name, swapped)


@each_plan
def test_validate__refuses_device_memory_that_is_not_released(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.takes or op.gives:
            for changed in (
                op._replace(takes=0.0, gives=0.0),
                op._replace(takes=2 * op.takes + 1),
            ):
                refused(
                    name,
                    [*plan.ops[:index], changed, *plan.ops[index + 1 :]],
                    "device memory",
                )


@each_plan
def test_validate__refuses_an_operation_on_the_wrong_resource(name: str) -> None:
    plan, _ = PLANS[name]
    allowed = {"update": {"cpu", "gpu"}, "cast": {"cpu"}, "clip": {"cpu"}}
    for index, op in enumerate(plan.ops):
        for resource in {"cpu", "gpu", "h2d", "d2h"} - allowed.get(
            op.kind, {op.resource}
        ):
            moved = op._replace(resource=resource)  # type: ignore[arg-type]
            refused(
                name,
                [*plan.ops[:index], moved, *plan.ops[index + 1 :]],
                "cannot run on|finds no",
            )


@each_plan
def test_validate__refuses_an_update_on_the_other_processor(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.kind == "update":
            moved = op._replace(resource="cpu" if op.resource == "gpu" else "gpu")
            refused(name, [*plan.ops[:index], moved, *plan.ops[index + 1 :]])


BREAKS: dict[str, tuple[Callable[[Op], Op], str]] = {
    "later input": (
        lambda op: op._replace(after=(*op.after, 10**6)),
        "waits for a later operation",
    ),
    "negative input": (
        lambda op: op._replace(after=(*op.after, -1)),
        "waits for a later operation",
    ),
    "point before the iteration": (
        lambda op: op._replace(start=-0.5),
        "outside of the iteration",
    ),
    "point after the step": (
        lambda op: op._replace(start=4.5),
        "outside of the iteration",
    ),
    "point not a number": (
        lambda op: op._replace(start=float("nan")),
        "outside of the iteration",
    ),
    "subgroup beyond the last": (lambda op: op._replace(subgroup=99), "subgroup 99"),
    "negative subgroup": (lambda op: op._replace(subgroup=-1), "subgroup -1"),
}


@pytest.mark.parametrize("change_name", BREAKS)
@each_plan
def test_validate__refuses_impossible_operations(name: str, change_name: str) -> None:
    (plan, _), (change, message) = PLANS[name], BREAKS[change_name]
    for index, op in enumerate(plan.ops):
        if op.kind == "clip" and "subgroup" in message:
            continue
        refused(name, [*plan.ops[:index], change(op), *plan.ops[index + 1 :]], message)


def test_validate__refuses_a_cpu_update_of_resident_state() -> None:
    plan, workload = PLANS["zero-offload"]
    with pytest.raises(PlanError, match="update of subgroup 0 finds no state@host"):
        replace(plan, resident=frozenset({0})).validate(workload)


def test_validate__refuses_sets_that_contradict_the_operations() -> None:
    plan, workload = PLANS["adaptive"]
    for fewer in (
        replace(plan, resident=plan.resident - {0}),
        replace(plan, parked=plan.parked - {max(plan.parked)}),
        replace(plan, kept_gradients=plan.kept_gradients - {1}),
    ):
        with pytest.raises(PlanError):
            fewer.validate(workload)


def test_validate__refuses_an_update_before_clipping() -> None:
    plan = make_plan("interleaved:2", windows(clipping=False), TEST_MACHINE)
    with pytest.raises(PlanError, match="finds no factor"):
        plan.validate(windows())


@pytest.mark.parametrize("name", ["adaptive, no clipping", "zero-offload"])
def test_validate__refuses_a_read_before_the_gradient_is_ready(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.kind == "gradient down" or (
            op.kind == "update" and op.subgroup in plan.kept_gradients
        ):
            sooner = op._replace(start=op.start - 0.01)
            refused(
                name,
                [*plan.ops[:index], sooner, *plan.ops[index + 1 :]],
                "starts before the gradient of subgroup . is ready",
            )


def test_validate__refuses_clipping_before_all_gradients_are_ready() -> None:
    plan, _ = PLANS["adaptive"]
    (index,) = (index for index, op in enumerate(plan.ops) if op.kind == "clip")
    sooner = plan.ops[index]._replace(start=2.9)
    refused(
        "adaptive",
        [*plan.ops[:index], sooner, *plan.ops[index + 1 :]],
        "clip starts before the gradient of subgroup 0 is ready",
    )


@given(workloads(), st.floats(0, 1.5))
def test_point_at__inverts_the_time_of_a_point(
    workload: Workload, share: float
) -> None:
    seconds = share * workload.compute_s
    point = point_at(workload, seconds)
    assert OTHER <= point <= UPDATE
    lengths = (workload.other_s, workload.forward_s, workload.backward_s)
    inverted = sum(
        length * min(max(point - phase, 0.0), 1.0)
        for phase, length in enumerate(lengths)
    )
    assert inverted == pytest.approx(min(seconds, workload.compute_s), abs=1e-12)
