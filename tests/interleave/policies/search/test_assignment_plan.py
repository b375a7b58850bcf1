"""Tests of the plans of assignments: valid, within the memory, and no cheaper than
their lower bound."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.interleave.model.operations import OVERLAPS
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import CPU_SHARES, ROLES, Assignment
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.interleave import on_device
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even
from tests.interleave.strategies import machines, workloads


@st.composite
def assignments(draw: st.DrawFn, count: int) -> Assignment:
    """Draw any assignment of so many subgroups."""
    roles = {
        subgroup: draw(st.sampled_from(ROLES))
        for subgroup in draw(st.permutations(range(count)))
    }

    def with_roles(*kinds: str) -> tuple[int, ...]:
        return tuple(subgroup for subgroup, role in roles.items() if role in kinds)

    on_gpu = with_roles(*ROLES[1:])
    return Assignment(
        on_cpu=with_roles("cpu"),
        moved=with_roles("streamed", "early") + with_roles("late", "parked"),
        resident=with_roles("resident"),
        early=frozenset(with_roles("early", "parked")),
        late=frozenset(with_roles("late", "parked")),
        round_trips=frozenset(subgroup for subgroup in on_gpu if draw(st.booleans())),
        slots=draw(st.integers(1, count)),
        gradients_in_flight=draw(st.integers(0, 2)),
        uploads_first=draw(st.booleans()),
        cpu_share=draw(st.sampled_from(CPU_SHARES)),
        moved_late=draw(st.booleans()),
        speculated=draw(st.integers(0, count)),
    )


@given(workloads(max_subgroups=8), machines(), st.data())
def test_plan_of__is_valid_and_has_the_roles_of_the_assignment(
    workload: Workload, machine: Machine, data: st.DataObject
) -> None:
    assignment = data.draw(assignments(len(workload.subgroups)))
    costs = PlanCosts(workload, machine, "test", 10**6)
    plan = costs.plan(assignment)
    assert plan.resident == frozenset(assignment.resident)
    assert plan.parked == assignment.late
    counts = plan.counts()
    assert counts.get("update on cpu", 0) == len(assignment.on_cpu)
    assert counts.get("fetch", 0) == counts.get("flush", 0) == len(assignment.moved)
    assert not plan.kept_gradients & assignment.round_trips
    assert plan.cpu_share == (assignment.cpu_share if assignment.on_cpu else 1)


@given(workloads(max_subgroups=8), machines(), st.data())
def test_cost__is_that_of_the_simulated_plan_and_no_less_than_its_bound(
    workload: Workload, machine: Machine, data: st.DataObject
) -> None:
    assignment = data.draw(assignments(len(workload.subgroups)))
    costs = PlanCosts(workload, machine, "test", 10**6)
    schedule = simulate(costs.plan(assignment), workload, machine)
    if schedule.fits_device(None):
        assert costs.minimums.of_assignment(assignment) <= schedule.iteration_s * (
            1 + 1e-9
        )
        assert costs.seconds(assignment) == schedule.iteration_s
        # Ties are decided by little.
        assert (
            schedule.iteration_s
            <= costs.cost(assignment)
            <= 1.01 * schedule.iteration_s + 1e-6
        )
    else:
        assert costs.seconds(assignment) == INFINITE
    assert costs.minimums.of_plan(schedule.plan) <= schedule.iteration_s * (1 + 1e-9)


@given(
    workloads(max_subgroups=8),
    machines(),
    st.sampled_from(["backward", "both"]),
    st.data(),
)
def test_cost__of_speculative_updates_is_no_less_than_its_bound(
    workload: Workload, machine: Machine, overlap: str, data: st.DataObject
) -> None:
    assignment = data.draw(assignments(len(workload.subgroups)))
    costs = PlanCosts(workload, machine, "test", 10**6, OVERLAPS[overlap])
    plan, seconds = costs.plan(assignment), costs.seconds(assignment)
    assert plan.speculated <= set(assignment.on_cpu)
    assert costs.minimums.of_assignment(assignment) <= seconds * (1 + 1e-9)
    assert seconds == INFINITE or costs.minimums.of_plan(plan) <= seconds * (1 + 1e-9)


@given(workloads(max_subgroups=8), machines(), st.data())
def test_cost__of_late_updates_is_no_less_than_its_bound(
    workload: Workload, machine: Machine, data: st.DataObject
) -> None:
    assignment = data.draw(assignments(len(workload.subgroups)))
    costs = PlanCosts(workload, machine, "test", 10**6, OVERLAPS["forward"])
    plan = costs.plan(assignment)
    parked_or_resident = plan.resident | plan.parked
    on_time = (
        parked_or_resident
        if assignment.moved_late
        else parked_or_resident | set(assignment.moved)
    )
    assert {op.subgroup for op in plan.ops if op.is_late}.isdisjoint(on_time)
    assert plan.has_late_operations or not assignment.on_cpu
    seconds = costs.seconds(assignment)
    assert costs.minimums.of_assignment(assignment) <= seconds * (1 + 1e-9)
    if seconds < INFINITE:
        assert costs.minimums.of_plan(plan) <= seconds * (1 + 1e-9)


@settings(max_examples=examples(25, by_default=6))
@given(workloads(clipping=True, max_subgroups=8), machines(), st.data())
def test_plan_of__keeps_within_constant_memory_whatever_the_rates(
    workload: Workload, machine: Machine, data: st.DataObject
) -> None:
    """Fetches wait for flushes: the order of events does not depend on rates, if those
    before the update go first."""
    assignment = data.draw(assignments(len(workload.subgroups)))
    assume(set(assignment.moved[: len(assignment.early)]) == assignment.early)
    # A gradient that was copied to the host comes back into memory of its own where
    # parameters are part of the state.
    returned_bytes = workload.grad_bytes if workload.master != "fp32" else 0.0
    largest = max(workload.subgroups) * (workload.state_bytes + returned_bytes)
    always = (
        sum(workload.subgroups[s] for s in {*assignment.resident, *assignment.late})
        * workload.state_bytes
    )
    always += sum(workload.subgroups[s] for s in assignment.resident) * returned_bytes
    # Only the simulator knows whether parked state is flushed before gradients take the
    # memory: here there is both.
    always += workload.params * workload.grad_bytes if assignment.late else 0.0
    free_bytes = always + largest + data.draw(st.floats(0, 1)) * workload.params * 14
    constant = replace(workload, gpu_free=((0.0, free_bytes),))
    schedule = simulate(
        PlanCosts(constant, machine, "test", 10**6).plan(assignment), constant, machine
    )
    used = on_device.used(schedule, on_device.grid(schedule))
    assert used.max() <= free_bytes * (1 + 1e-9) + 10
    assert schedule.fits_device(None)


def test_plan_of__waits_for_as_many_flushes_as_a_fetch_needs() -> None:
    """Memory for the large subgroup alone, or for two small ones."""
    sizes = (10**8, 10**8, 2 * 10**8)
    workload = even(4, sizes=sizes, gpu_free=((0.0, 2.5e9),), grad_bytes=0.0)
    plan = PlanCosts(workload, TEST_MACHINE, "test", 1000).plan(
        Assignment((), (0, 1, 2), (), slots=3)
    )
    fetches = [op for op in plan.ops if op.kind == "fetch"]
    assert [len(op.after) for op in fetches] == [0, 0, 2]
    assert {plan.ops[index].kind for index in fetches[2].after} == {"flush"}


def test_plan_of__shares_the_link_in_the_order_of_the_next_forward() -> None:
    """Fetches and uploads of late updates, also of speculative ones."""
    assignment = Assignment(
        on_cpu=(0, 2, 4),
        moved=(1, 3, 5),
        resident=(),
        uploads_first=False,
        speculated=2,
    )
    workload = even(6, 10**8, gpu_free=((0.0, 20e9),))
    plan = PlanCosts(workload, TEST_MACHINE, "test", 10**6, OVERLAPS["both"]).plan(
        assignment
    )
    assert [op.subgroup for op in plan.ops if op.kind in ("fetch", "upload")] == list(
        range(6)
    )
    assert plan.speculated == {2, 4}


def test_seconds__are_those_of_an_iteration_after_others() -> None:
    """Parked state leaves when an iteration begins, while late flushes of the one
    before go on."""
    rates = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    machine = replace(
        TEST_MACHINE,
        cpu_update_params_per_s=0.5e9,
        step_overhead_s=0.0,
        **dict.fromkeys(rates, 10e9),
    )
    workload = replace(
        even(4, 10**8, gpu_free=((0.0, 5e9),)),
        other_s=0.0,
        forward_s=0.3,
        backward_s=0.2,
    )
    parked = frozenset({0, 1})
    assignment = Assignment(
        (), (0, 1, 2, 3), (), early=parked, late=parked, slots=4, uploads_first=False
    )
    costs = PlanCosts(workload, machine, "test", 10**6, OVERLAPS["forward"])
    schedule = simulate(costs.plan(assignment), workload, machine)
    assert costs.seconds(assignment) == schedule.iteration_s > 0.8
