"""The option `overlap`: phases that updates may run in beside the step, and the best
count of subgroups for that."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from ebbtide.features.overlap.speculation import speculate
from ebbtide.interleave.model.kinds import find_kind, from_backward
from ebbtide.interleave.model.operations import Hold, Overlap, overlaps_of
from ebbtide.interleave.model.plan import BACKWARD, Op, Plan, forward_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import complete
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine

Cost = tuple[bool, bool, float]
# The counts are divided into this many steps at first.
_FIRST_COUNTS = 8
_START, _HOLDS = Op._fields.index("start"), Op._fields.index("holds")


def best_count(most: int, cost: Callable[[int], Cost]) -> int:
    """Return the best count from 0 to a number: of some evenly spread ones, and then of
    counts near the best.

    `cost` returns the cost of a count (see `Steps.cost`); it is called once for each.
    """
    cost_of = cache(cost)
    step = max(1, most // _FIRST_COUNTS)
    best = min(range(0, most + 1, step), key=cost_of)
    while step:
        best = min((best, max(0, best - step), min(most, best + step)), key=cost_of)
        step //= 2
    return best


def with_overlap(plan: Plan, workload: Workload, machine: Machine, option: str) -> Plan:
    """Return a plan whose updates may run in other phases than the step.

    `none` is the plan itself, `auto` the best. It has as many speculated subgroups as
    give the shortest mean iteration, within the memory of the host. The plan must
    update subgroups in the order in which the forward needs them.
    """
    overlaps = overlaps_of(option)
    if not overlaps:
        return plan
    if option == "forward":
        return late(plan, workload).validate(workload)

    def cost(candidate: Plan) -> tuple[bool, bool, float]:
        return simulate_steps(
            complete(candidate, workload, machine), workload, machine
        ).cost(machine)

    plans = [plan]
    for overlap in overlaps:
        plans.append(
            _speculating(plan, workload, overlap, cost)
            if overlap.backward
            else late(plan, workload)
        )
    return min(plans, key=cost).validate(workload)


def _speculating(
    plan: Plan, workload: Workload, overlap: Overlap, cost: Callable[[Plan], Cost]
) -> Plan:
    """Return the best plan by the number of subgroups that it speculates: of some
    numbers, and then of numbers near the best."""

    def with_count(count: int) -> Plan:
        speculating = speculate(
            plan, workload, count, uploads_first=not overlap.forward
        )
        return late(speculating, workload) if overlap.forward else speculating

    most = plan.counts().get("update on cpu", 0)
    return with_count(best_count(most, lambda count: cost(with_count(count))))


def late(plan: Plan, workload: Workload, on_time: frozenset[int] = frozenset()) -> Plan:
    """Return a plan, not validated, whose updates may end in the next iteration, except
    `on_time`.

    Parameters are due when the next forward first uses them, flushed state before the
    next backward, which fetches again. Updates of resident state are short and stay
    with the step, as do parked state and what uses the job's own gradients."""
    needed = forward_points(workload)
    used_in_place = (
        plan.kept_gradients if workload.gradients_held_until_step else frozenset()
    )
    on_time = _with_predecessors(
        plan, on_time | plan.resident | plan.parked | used_in_place
    )

    def late_op(op: Op) -> Op:
        if not find_kind(op.kind).may_be_late or op.subgroup in on_time:
            return op
        due = needed[op.subgroup] if find_kind(op.kind).writes_parameters else BACKWARD
        # Without `_replace`, which takes several times as long.
        holds = Hold(due, is_next=True)
        return Op._make(
            (
                *op[:_START],
                max(op.start, BACKWARD),
                *op[_START + 1 : _HOLDS],
                holds,
                *op[_HOLDS + 1 :],
            )
        )

    ops = tuple(map(late_op, plan.ops))
    if any(op.is_late for op in ops):
        ops = tuple(map(from_backward, ops))
    return replace(plan, ops=ops)


def _with_predecessors(plan: Plan, subgroups: frozenset[int]) -> frozenset[int]:
    """Return the subgroups, and all those whose operations theirs wait for."""
    result = set(subgroups)
    while result:
        before = len(result)
        for op in plan.ops:
            if op.subgroup in result:
                inputs = (plan.ops[index] for index in op.after)
                result |= {
                    one.subgroup for one in inputs if find_kind(one.kind).may_be_late
                }
        if len(result) == before:
            break
    return frozenset(result)
