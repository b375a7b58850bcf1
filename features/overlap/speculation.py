"""Speculative updates, computed beside the old state before it is known whether
clipping changes them."""

from dataclasses import replace

from ebbtide.interleave.model.operations import SPECULATIVE
from ebbtide.interleave.model.plan import STEP, Op, Plan, gradient_ready_points
from ebbtide.interleave.model.workload import Workload

_AFTER = Op._fields.index("after")


def speculate(
    plan: Plan, workload: Workload, count: int, uploads_first: bool = False
) -> Plan:
    """Return a plan that updates the last subgroups on the CPU early.

    It is not validated. The gradients of these subgroups come first, and updates begin
    as soon as they are there. Uploads follow when clipping has said that they are
    valid, before all else of the step (`uploads_first`) or in their places. There are
    no such updates without clipping, or if gradients are held until the step.
    """
    if not workload.clipping or workload.copies_at_step or count <= 0:
        return plan
    on_cpu = sorted(
        op.subgroup for op in plan.ops if op.kind == "update" and op.resource == "cpu"
    )
    chosen = frozenset(on_cpu[-count:])
    clip = next(index for index, op in enumerate(plan.ops) if op.kind == "clip")
    points = gradient_ready_points(workload)
    copies = {
        op.subgroup: index
        for index, op in enumerate(plan.ops)
        if op.kind == "gradient down"
    }

    ops = list(plan.ops)
    updates: list[int] = []
    moved: list[int] = []
    for index, op in enumerate(plan.ops):
        if op.subgroup in chosen and op.kind == "update":
            # It may wait for its gradient by way of clipping.
            inputs = (*op.after, copies[op.subgroup])
            after = tuple(
                dict.fromkeys(
                    before
                    for before in inputs
                    if plan.ops[before].kind == "gradient down"
                )
            )
            ops[index] = op._replace(
                tag=SPECULATIVE, after=after, start=points[op.subgroup]
            )
            updates.append(index)
        elif op.subgroup in chosen and op.kind in ("cast", "upload"):
            ops[index] = op._replace(
                after=tuple({clip: None, **dict.fromkeys(op.after)})
            )
            moved.append(index)
    if not uploads_first:
        return replace(plan, ops=tuple(ops))
    updates.sort(key=lambda index: -ops[index].subgroup)
    taken = {*updates, *moved}
    first = [index for index in range(clip + 1) if index not in taken]
    rest = [index for index in range(clip + 1, len(ops)) if index not in taken]
    order = [*first, *updates, *moved, *rest]
    places = dict(zip(order, range(len(order)), strict=True))
    reordered = (
        _with_after(ops[index], tuple([places[before] for before in ops[index].after]))
        for index in order
    )
    return replace(plan, ops=tuple(reordered))


def redone(plan: Plan) -> Plan:
    """Return the plan of a step that clipping changes, to be simulated.

    Speculative updates are computed again from the old state, and state in storage is
    read again.
    """
    if plan.rolls_back:
        return _rolled_back(plan)
    ops: list[Op] = []
    indices: list[int] = []
    again: dict[int, int] = {}
    speculative = {
        op.subgroup: index for index, op in enumerate(plan.ops) if op.is_speculative
    }
    clip = -1
    reads = {op.subgroup: op for op in plan.ops if op.kind == "read"}

    def append(op: Op, *after: int) -> int:
        ops.append(_with_after(op, tuple(dict.fromkeys(after))))
        return len(ops) - 1

    def update_again(source: int) -> int:
        update = plan.ops[source]._replace(tag=None, start=STEP)
        read = reads.get(update.subgroup)
        if read is None:
            return append(update, indices[source], clip)
        read_again = append(
            read._replace(start=STEP, holds=update.holds), indices[source], clip
        )
        return append(update, indices[source], clip, read_again)

    for op in plan.ops:
        source = speculative.get(op.subgroup, -1)
        if source in op.after and source not in again:
            again[source] = update_again(source)
        indices.append(
            append(op, *[again.get(index, indices[index]) for index in op.after])
        )
        if op.kind == "clip":
            clip = indices[-1]
    return replace(plan, ops=tuple(ops))


def _rolled_back(plan: Plan) -> Plan:
    """Return the plan of a step in which updates are undone and run once more.

    To undo one takes as long as an update.
    """
    clip = next(index for index, op in enumerate(plan.ops) if op.kind == "clip")
    ops = list(plan.ops)
    for number, update in enumerate(plan.ops):
        if not update.is_speculative:
            continue
        undo = update._replace(tag=None, start=STEP, after=(number, clip))
        places = {number: len(ops) + 1}
        ops += [undo, undo._replace(after=(len(ops),))]
        for index, op in enumerate(plan.ops):
            if op.subgroup == update.subgroup and op.kind in ("cast", "upload"):
                places[index] = len(ops)
                after = tuple(places.get(before, before) for before in op.after)
                ops.append(op._replace(start=STEP, after=after))
    return replace(plan, ops=tuple(ops))


def _with_after(op: Op, after: tuple[int, ...]) -> Op:
    """Return an operation that waits for others."""
    if op.after == after:
        return op
    # Without `_replace`, which takes several times as long: searches come here for each
    # operation of each plan.
    return Op._make((*op[:_AFTER], after, *op[_AFTER + 1 :]))
