"""Checks of operations that move state between storage and host memory: sizes and
places, besides their data flow."""

from ebbtide.errors import PlanError
from ebbtide.features.storage.kinds import STATE_ONLY
from ebbtide.interleave.model.operations import BACKWARD, plan_error
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.state_bytes import MASTER_BYTES


def check_storage(plan: Plan, workload: Workload) -> None:
    """Check that reads and writes move all of the state through fitting buffers.

    Gradients in storage are checked, too; buffers must hold what passes.

    Raises PlanError."""
    ops = [op for op in plan.ops if op.kind in ("read", "write")]
    buffers = plan.storage_buffers
    if buffers and not ops:
        raise PlanError(
            f"policy {plan.policy}: there are {len(buffers)} storage buffers, and "
            "nothing is in storage"
        )
    has_gradients = not plan.follows(STATE_ONLY)
    for op in ops:
        is_read, is_gradient = op.kind == "read", has_gradients and op.tag is None
        size, gradient = (
            width * workload.subgroups[op.subgroup]
            for width in (workload.state_bytes, MASTER_BYTES)
        )
        if is_gradient:
            size = gradient
        elif has_gradients and is_read:
            size += gradient
        if not (is_gradient or (op.tag is not None and 0 <= op.tag < len(buffers))):
            raise plan_error(
                plan.policy, op, "has no buffer, or one that does not exist"
            )
        if op.nbytes != size:
            raise plan_error(
                plan.policy,
                op,
                f"does not move the whole {'gradient' if is_gradient else 'state'}",
            )
        if not is_gradient and buffers[op.tag] < size:
            raise plan_error(plan.policy, op, "is larger than its buffer")
        if is_read and op.start < BACKWARD:
            # The write of the iteration before may still run until then, of this
            # subgroup or of another one.
            raise plan_error(plan.policy, op, "starts before the backward")
