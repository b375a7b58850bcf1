"""Plans: sound ones of every policy pass, and every way of breaking one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, OTHER, UPDATE, Op, point_at
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.policies.placement import Placement, placed
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.test_simulator import BOX, even
from tests.interleave.strategies import machines, policies, workloads


@given(policies(), workloads(), machines())
def test_every_policy_makes_sound_plans(policy: str, workload: Workload, machine: Machine) -> None:
    plan = make_plan(policy, workload, machine)
    assert plan.validate(workload) is plan
    assert plan.policy == policy
    assert plan.subgroups == len(workload.subgroups)
    where = {op.subgroup: op.resource for op in plan.ops if op.kind == "update"}
    assert set(where) == set(range(plan.subgroups))
    assert all(where[subgroup] == "gpu" for subgroup in plan.resident | plan.kept_gradients | plan.parked)
    assert plan.held_bytes == pytest.approx(
        workload.state_bytes * sum(workload.subgroups[subgroup] for subgroup in plan.resident)
    )


@pytest.mark.parametrize("policy", ["zero-offload", "twin-flow:0.37", "pipelined", "interleaved:3@0.9", "gpu-only"])
@pytest.mark.parametrize("count", [1, 2, 5000])
def test_one_subgroup_and_thousands(policy: str, count: int) -> None:
    plan = make_plan(policy, even(count), BOX)
    updates = plan.counts()
    assert updates.get("update on cpu", 0) + updates.get("update on gpu", 0) == count


def windows(clipping: bool = True) -> Workload:
    return even(8, gpu_free=((0.0, 1e12),), clipping=clipping)


# Plans with everything that a plan can have: state that is resident, parked, streamed over the end of the iteration
# and within the update, and on the CPU.
PLACEMENT = Placement(resident=1, moved=5, slots=4, early=4, late=3, back=1)
PLANS = {
    "adaptive": (placed(windows(), PLACEMENT, "adaptive"), windows()),
    "adaptive, no clipping": (placed(windows(False), PLACEMENT, "adaptive"), windows(False)),
    "interleaved": (make_plan("interleaved:2@0.8", windows(), BOX), windows()),
    "interleaved, no room": (make_plan("interleaved:2", even(6, gpu_free=((0.0, 0.0),)), BOX), even(6)),
    "zero-offload": (make_plan("zero-offload", windows(), BOX), windows()),
}


def test_the_plans_that_are_broken_below_have_all_kinds_of_operations() -> None:
    kinds = {op.kind for plan, _ in PLANS.values() for op in plan.ops}
    assert kinds == {"gradient down", "gradient up", "clip", "fetch", "update", "flush", "cast", "upload"}
    plan = PLANS["adaptive"][0]
    assert plan.resident
    assert len(plan.parked) == PLACEMENT.late


def refused(name: str, ops: Iterable[Op], message: str | None = None) -> None:
    plan, workload = PLANS[name]
    with pytest.raises(PlanError, match=message):
        replace(plan, ops=tuple(ops)).validate(workload)


each_plan = pytest.mark.parametrize("name", PLANS)


@each_plan
def test_no_operation_may_be_left_out(name: str) -> None:
    """But a cast: an update may write half precision itself."""
    plan, _ = PLANS[name]
    for gone in range(len(plan.ops)):
        if plan.ops[gone].kind == "cast":
            continue
        refused(name, without(plan.ops, gone))


def without(ops: tuple[Op, ...], gone: int) -> list[Op]:
    """The operations but one; who waited for it waits for what it waited for."""

    def renumbered(after: tuple[int, ...]) -> tuple[int, ...]:
        stays = {early for early in after if early != gone} | (set(ops[gone].after) if gone in after else set())
        return tuple(sorted(early - (early > gone) for early in stays))

    return [op._replace(after=renumbered(op.after)) for index, op in enumerate(ops) if index != gone]


@each_plan
def test_no_dependency_may_be_left_out(name: str) -> None:
    """But those that no result needs: on room in a buffer, on the upload in ZeRO-Offload's loop, and on clipping where
    a gradient goes up."""
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        for early in op.after:
            other = plan.ops[early]
            if op.kind == "fetch" and other.subgroup != op.subgroup:
                continue
            if other.kind == "upload" or (op.kind == "gradient up" and other.kind == "clip"):
                continue
            fewer = op._replace(after=tuple(one for one in op.after if one != early))
            refused(name, [*plan.ops[:index], fewer, *plan.ops[index + 1 :]])


@each_plan
def test_nothing_may_come_twice(name: str) -> None:
    plan, _ = PLANS[name]
    for op in plan.ops:
        refused(name, [*plan.ops, op._replace(acquire=0.0, release=0.0)], "comes twice")


@each_plan
def test_nothing_may_stand_before_what_it_waits_for(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        for early in op.after:
            swapped = list(plan.ops)
            swapped[index], swapped[early] = swapped[early], swapped[index]
            refused(name, swapped)


@each_plan
def test_device_memory_must_be_given_back(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.acquire or op.release:
            for changed in (op._replace(acquire=0.0, release=0.0), op._replace(acquire=2 * op.acquire + 1)):
                refused(name, [*plan.ops[:index], changed, *plan.ops[index + 1 :]], "device memory")


@each_plan
def test_an_operation_runs_where_its_kind_can(name: str) -> None:
    plan, _ = PLANS[name]
    allowed = {"update": {"cpu", "gpu"}, "cast": {"cpu"}, "clip": {"cpu"}}
    for index, op in enumerate(plan.ops):
        for resource in {"cpu", "gpu", "h2d", "d2h"} - allowed.get(op.kind, {op.resource}):
            moved = op._replace(resource=resource)  # type: ignore[arg-type]
            refused(name, [*plan.ops[:index], moved, *plan.ops[index + 1 :]], "cannot run on|without a|device")


@each_plan
def test_an_update_may_not_change_sides(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.kind == "update":
            moved = op._replace(resource="cpu" if op.resource == "gpu" else "gpu")
            refused(name, [*plan.ops[:index], moved, *plan.ops[index + 1 :]])


BREAKS: dict[str, tuple[Callable[[Op], Op], str]] = {
    "it waits for what comes later": (lambda op: op._replace(after=(*op.after, 10**6)), "waits for what comes later"),
    "it waits for what is no operation": (lambda op: op._replace(after=(*op.after, -1)), "waits for what comes later"),
    "it begins before the iteration": (lambda op: op._replace(point=-0.5), "no place in an iteration"),
    "it begins after the step": (lambda op: op._replace(point=4.5), "no place in an iteration"),
    "it begins at no number": (lambda op: op._replace(point=float("nan")), "no place in an iteration"),
    "its subgroup is beyond the last": (lambda op: op._replace(subgroup=99), "subgroup 99"),
    "its subgroup is negative": (lambda op: op._replace(subgroup=-1), "subgroup -1"),
}


@pytest.mark.parametrize("what", BREAKS)
@each_plan
def test_an_operation_must_make_sense(name: str, what: str) -> None:
    (plan, _), (change, message) = PLANS[name], BREAKS[what]
    for index, op in enumerate(plan.ops):
        if op.kind == "clip" and "subgroup" in message:
            continue
        refused(name, [*plan.ops[:index], change(op), *plan.ops[index + 1 :]], message)


def test_state_that_is_on_the_device_is_not_updated_on_the_cpu() -> None:
    plan, workload = PLANS["zero-offload"]
    with pytest.raises(PlanError, match="with its state on the device"):
        replace(plan, resident=frozenset({0})).validate(workload)


def test_what_is_resident_parked_or_kept_must_be_so_by_the_plan() -> None:
    plan, workload = PLANS["adaptive"]
    for fewer in (
        replace(plan, resident=plan.resident - {0}),
        replace(plan, parked=plan.parked - {max(plan.parked)}),
        replace(plan, kept_gradients=plan.kept_gradients - {1}),
    ):
        with pytest.raises(PlanError):
            fewer.validate(workload)


def test_with_clipping_nothing_is_updated_before_it() -> None:
    plan = make_plan("interleaved:2", windows(clipping=False), BOX)
    with pytest.raises(PlanError, match="does not wait for the clipping"):
        plan.validate(windows())


@pytest.mark.parametrize("name", ["adaptive, no clipping", "zero-offload"])
def test_no_gradient_is_read_before_it_is_made(name: str) -> None:
    plan, _ = PLANS[name]
    for index, op in enumerate(plan.ops):
        if op.kind == "gradient down" or (op.kind == "update" and op.subgroup in plan.kept_gradients):
            sooner = op._replace(point=op.point - 0.01)
            refused(name, [*plan.ops[:index], sooner, *plan.ops[index + 1 :]], "before its gradient is made")


def test_no_norm_is_taken_before_all_gradients_are_made() -> None:
    plan, _ = PLANS["adaptive"]
    (index,) = (index for index, op in enumerate(plan.ops) if op.kind == "clip")
    sooner = plan.ops[index]._replace(point=2.9)
    refused("adaptive", [*plan.ops[:index], sooner, *plan.ops[index + 1 :]], "before all gradients are made")


@given(workloads(), st.floats(0, 1.5))
def test_a_point_of_the_iteration_lies_where_it_is_said_to(workload: Workload, share: float) -> None:
    seconds = share * workload.compute_s
    point = point_at(workload, seconds)
    assert OTHER <= point <= UPDATE
    lengths = (workload.other_s, workload.forward_s, workload.backward_s)
    back = sum(length * min(max(point - phase, 0.0), 1.0) for phase, length in enumerate(lengths))
    assert back == pytest.approx(min(seconds, workload.compute_s), abs=1e-12)


def test_points_are_phases_and_their_shares() -> None:
    workload = even(2, other_s=1.0, forward_s=2.0, backward_s=4.0)
    points = {0.0: OTHER, 0.5: 0.5, 1.0: FORWARD, 2.0: 1.5, 3.0: BACKWARD, 6.0: 2.75, 7.0: UPDATE, 9.0: UPDATE}
    assert {seconds: point_at(workload, seconds) for seconds in points} == points
