"""Checks of updates beside other phases: when late operations end, and which may
speculate."""

from ebbtide.interleave.model.kinds import Kind, find_kind
from ebbtide.interleave.model.operations import (
    BACKWARD,
    FORWARD,
    Op,
    forward_points,
    plan_error,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload


def check_overlap(plan: Plan, workload: Workload) -> None:
    """Check the late operations of a plan.

    What follows one must be late, parameters must be new before the next forward uses
    them, and the next iteration must begin when all late operations have ended, as the
    engine does. Raises PlanError.
    """
    is_late = plan.has_late_operations
    for op in plan.ops:
        if op.is_speculative and (
            op.resource != "cpu" or not workload.clipping or workload.copies_at_step
        ):
            raise plan_error(
                plan.policy,
                op,
                "cannot be speculative: updates on the CPU can, before clipping",
            )
        kind = find_kind(op.kind)
        if is_late and kind.on_subgroups:
            problem = _problem(op, kind, plan, workload)
            if problem is not None:
                raise plan_error(plan.policy, op, problem)


def _problem(op: Op, kind: Kind, plan: Plan, workload: Workload) -> str | None:
    """Return what is wrong with an operation of a plan with late ones."""
    if op.start < BACKWARD:
        return "may start before the late operations of the iteration before have ended"
    if op.due is None:
        is_after_late = any(plan.ops[before].is_late for before in op.after)
        return "waits for a late operation and is not late" if is_after_late else None
    if not kind.may_be_late:
        return "cannot be late"
    is_in_place = (
        workload.gradients_held_until_step and op.subgroup in plan.kept_gradients
    )
    if is_in_place and op.kind == "update":
        return "cannot be late: the job holds its gradient only until the step returns"
    limit = (
        forward_points(workload)[op.subgroup] if kind.writes_parameters else BACKWARD
    )
    if not FORWARD <= op.due <= limit:
        return f"is due at point {op.due}, which must be from {FORWARD} to {limit}"
    return None
