"""Random plans, with and without state in storage: every kind of placement and overlap,
any legal point and due."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from ebbtide.errors import PlanError
from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import redone, speculate
from ebbtide.features.storage.policy import StorageLayout, stored_in
from ebbtide.interleave.model.operations import OVERLAPS, Hold
from ebbtide.interleave.model.plan import (
    BACKWARD,
    FORWARD,
    STEP,
    UPDATE,
    Plan,
    forward_points,
)
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.search.assignment import ROLES, Assignment, FreeMemory
from ebbtide.interleave.policies.search.assignment_plan import plan_of
from ebbtide.machines.machine import Machine, StoragePath
from tests.interleave.engine import plans as engine_plans
from tests.interleave.strategies import machines, spread, workloads

# Operations before the backward: these and what they wait for.
_EARLY_POINTS = (0.5, FORWARD, 1.5)


@st.composite
def paths(draw: st.DrawFn) -> StoragePath:
    """Draw the rates of a path."""
    read, write = draw(spread(0.3e9, 60e9)), draw(spread(0.3e9, 60e9))
    both = draw(
        st.none() | st.floats(0.6, 1.0).map(lambda share: share * (read + write))
    )
    return StoragePath(read, write, None, both)


@st.composite
def cases(
    draw: st.DrawFn, max_subgroups: int = 8, stored: bool = True, again: bool = True
) -> tuple[Plan, Workload, Machine]:
    """Draw a valid plan, its workload and a machine with storage.

    Args:
        draw: Draws from a strategy.
        max_subgroups: Largest number of subgroups.
        stored: Whether state is in storage.
        again: Whether some plans are those of redone steps.
    """
    workload = draw(workloads(max_subgroups=max_subgroups))
    machine = replace(
        draw(machines()), storage=tuple(draw(st.lists(paths(), min_size=1, max_size=2)))
    )
    everything = (
        2
        * workload.params
        * (workload.state_bytes + workload.grad_bytes + workload.param_bytes)
    )
    workload = replace(
        workload,
        gpu_free=((0.0, everything),),
        host_free_bytes=draw(st.floats(0, 1)) * everything / 2,
    )
    overlap = OVERLAPS[draw(st.sampled_from([*OVERLAPS]))]
    if draw(st.booleans()):
        plan = plan_of(
            workload,
            FreeMemory(workload),
            draw(_assignments(workload)),
            "random",
            overlap,
        )
    else:
        plan = draw(engine_plans.plans(workload))
        if overlap.backward:
            plan = speculate(plan, workload, draw(st.integers(0, 3)))
        if overlap.forward:
            plan = late(plan, workload)
    # Where operations wait for those of another subgroup, these cannot be moved at
    # will.
    assume(_is_valid(plan, workload))
    if stored:
        layout = StorageLayout(
            draw(st.sampled_from(["spread", "first", "last"])), draw(st.integers(1, 4))
        )
        plan = stored_in(plan, workload, machine, layout)
        assume(plan.stored and _is_valid(plan, workload))
    changed = draw(_changed(plan, workload))
    plan = changed if _is_valid(changed, workload) else plan
    return (
        redone(plan) if again and plan.speculated and draw(st.booleans()) else plan,
        workload,
        machine,
    )


@st.composite
def _assignments(draw: st.DrawFn, workload: Workload) -> Assignment:
    count = len(workload.subgroups)
    order = draw(st.permutations(range(count)))
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=count, max_size=count))
    of = {role: tuple(s for s in order if roles[s] == role) for role in ROLES}
    on_gpu = tuple(s for s in order if roles[s] != "cpu")
    late_ones, early_ones = (
        frozenset(of["late"] + of["parked"]),
        frozenset(of["early"] + of["parked"]),
    )
    return Assignment(
        of["cpu"],
        # Those that must be flushed come before those that stay.
        tuple(
            sorted(
                (s for s in on_gpu if roles[s] != "resident"),
                key=late_ones.__contains__,
            )
        ),
        of["resident"],
        early_ones,
        late_ones,
        frozenset(s for s in on_gpu if draw(st.booleans())),
        max(1, len(early_ones), len(late_ones), draw(st.integers(1, 3))),
        uploads_first=draw(st.booleans()),
        cpu_share=draw(st.sampled_from([1.0, 1.0, 0.5])),
        speculated=draw(st.integers(0, count)),
        moved_late=draw(st.booleans()),
    )


@st.composite
def _changed(draw: st.DrawFn, plan: Plan, workload: Workload) -> Plan:
    """Draw changes of a few operations: they may start later, or are due earlier."""
    ops = list(plan.ops)
    for index in draw(st.lists(st.integers(0, len(ops) - 1), max_size=4)):
        op = ops[index]
        if op.is_late and draw(st.booleans()):
            needed = [FORWARD, 1.5, BACKWARD, *forward_points(workload)]
            due = draw(
                st.sampled_from([due for due in needed if due <= op.holds.point])
            )
            ops[index] = op._replace(holds=Hold(due, is_next=True))
        else:
            later = [
                point
                for point in (*_EARLY_POINTS, BACKWARD, 2.5, UPDATE, STEP)
                if point >= op.start
            ]
            holds = op.holds if op.is_late else None
            ops[index] = op._replace(
                start=draw(st.sampled_from(later or [op.start])), holds=holds
            )
    return replace(plan, ops=tuple(ops))


def _is_valid(plan: Plan, workload: Workload) -> bool:
    try:
        plan.validate(workload)
    except PlanError:
        return False
    return True
