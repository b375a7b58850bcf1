"""The option `overlap`: phases that updates may run in, beside the step."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ebbtide.interleave.model.plan import BACKWARD, LATE_KINDS, WRITES_PARAMETERS, Op, Plan, forward_points
from ebbtide.interleave.model.workload import Workload


class Overlap(NamedTuple):
    """Phases that updates may run in, beside the step.

    Attributes:
        forward: Whether updates may end in the next forward, as far as it does not need the parameters yet.
    """

    forward: bool = False

    @property
    def name(self) -> str:
        """The value of the option."""
        return "forward" if self.forward else "none"


NO_OVERLAP = Overlap()
OVERLAPS = {overlap.name: overlap for overlap in (NO_OVERLAP, Overlap(forward=True))}
OVERLAP = tuple(OVERLAPS)


def with_overlap(plan: Plan, workload: Workload, overlap: str) -> Plan:
    """Return a plan whose updates may run in other phases than the step.

    Args:
        plan: A plan that updates subgroups in the order in which the forward needs them.
        workload: The workload.
        overlap: `none`, which returns the plan itself, or `forward`.

    Raises:
        PlanError: The plan is not valid with late updates.
    """
    return late(plan, workload).validate(workload) if OVERLAPS[overlap].forward else plan


def late(plan: Plan, workload: Workload, on_time: frozenset[int] = frozenset()) -> Plan:
    """Return a plan whose updates may end in the next iteration, not validated.

    Parameters are due when the next forward first uses them, and state that is copied to the host before the next
    backward. Updates of resident state are short and stay with the step, as does state that is parked: it leaves the
    device when the iteration begins. State is not fetched again before the backward, by which it has been flushed.

    Args:
        plan: The plan.
        workload: The workload.
        on_time: Further subgroups whose operations end with the step.
    """
    needed = forward_points(workload)
    on_time = _with_predecessors(plan, on_time | plan.resident | plan.parked)

    def late_op(op: Op) -> Op:
        if op.kind not in LATE_KINDS or op.subgroup in on_time:
            return op
        due = needed[op.subgroup] if op.kind in WRITES_PARAMETERS else BACKWARD
        return op._replace(due=due, point=max(op.point, BACKWARD))

    return replace(plan, ops=tuple(map(late_op, plan.ops)))


def _with_predecessors(plan: Plan, subgroups: frozenset[int]) -> frozenset[int]:
    """Return the subgroups, and all those whose operations theirs wait for."""
    result = set(subgroups)
    while True:
        before = len(result)
        for op in plan.ops:
            if op.subgroup in result:
                result |= {plan.ops[index].subgroup for index in op.after if plan.ops[index].kind in LATE_KINDS}
        if len(result) == before:
            return frozenset(result)
