"""Late updates: state is updated under the next forward, as far as it does not need the parameters yet."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.interleave.model.plan import BACKWARD, LATE_KINDS, WRITES_PARAMETERS, Op, Plan, forward_points
from ebbtide.interleave.model.workload import Workload

OVERLAP = ("none", "forward")


def with_overlap(plan: Plan, workload: Workload, overlap: str) -> Plan:
    """Return a plan whose updates may end in the next iteration.

    Parameters are due when the next forward first uses them, and state that is copied to the host before the next
    backward. Updates of resident state are short and stay with the step, as does state that is parked.

    Args:
        plan: A plan that updates subgroups in the order in which the forward needs them.
        workload: The workload.
        overlap: `none`, which returns the plan itself, or `forward`.

    Raises:
        PlanError: The plan is not valid with late updates.
    """
    if overlap == "none":
        return plan
    needed = forward_points(workload)
    on_time = plan.resident | plan.parked

    def late(op: Op) -> Op:
        if op.kind not in LATE_KINDS or op.subgroup in on_time:
            return op
        return op._replace(due=needed[op.subgroup] if op.kind in WRITES_PARAMETERS else BACKWARD)

    return replace(plan, ops=tuple(map(late, plan.ops))).validate(workload)
