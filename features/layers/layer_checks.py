"""Checks of the operations of a plan on layers: weights and activations are on the device when compute uses them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ebbtide.errors import PlanError
from ebbtide.features.layers.model import LayerPlan, Stretch, stretches_of
from ebbtide.interleave.model.kinds import find_kind
from ebbtide.interleave.model.operations import UPDATE, Op
from ebbtide.interleave.model.workload import Workload


def check_layers(policy: str, ops: Sequence[Op], plan: LayerPlan | None, workload: Workload) -> None:
    """Check that no compute uses weights or activations that are not on the device, or more slots than there are.

    The workload is a placed one. Raises PlanError."""
    on_layers = [op for op in ops if find_kind(op.kind).on_layer]
    if plan is None:
        if on_layers:
            raise PlanError(f"policy {policy}: {on_layers[0].kind} without a plan for layers")
        return
    stretches = stretches_of(workload, plan)
    streamed = sorted(plan.streamed)
    weights = [(one, one.layer) for one in stretches if one.layer in plan.streamed]
    # Later ones are for an update on the GPU, which frees them again.
    arrivals = [op for op in on_layers if op.kind == "weights up" and op.point < UPDATE]
    at_end = frozenset(streamed[: plan.weight_slots])
    at_start = streamed[: plan.weight_slots]
    if workload.host_gradient_bytes is not None:
        at_start = []
        resident = [(one, one.layer) for one in stretches if one.layer not in plan.streamed]
        others = [op for op in arrivals if op.subgroup not in plan.streamed]
        arrivals = [op for op in arrivals if op.subgroup in plan.streamed]
        _walk(policy, "weights of layer", resident, others, [], len(resident))
    if _walk(policy, "weights of layer", weights, arrivals, at_start, plan.weight_slots) != at_end:
        raise PlanError(f"policy {policy}: weights of the first layers are not on the device when the iteration ends")
    _check_activations(policy, ops, plan, stretches)


def _walk(
    policy: str, what: str, uses: Sequence[tuple[Stretch, int]], arrivals: Iterable[Op], at_start: list[int], slots: int
) -> frozenset[int]:
    """Walk through uses of what passes through slots, and return what is in them at the end.

    An arrival takes the slot of what is used last of all. Each starts when that slot is free."""
    next_uses: dict[int, list[float]] = {}
    for stretch, key in reversed(uses):
        next_uses.setdefault(key, []).append(stretch.start)
    present = set(at_start)
    events = [(op.point, 0, op.subgroup) for op in arrivals]
    # An arrival at a point follows uses that end there.
    events = sorted([*events, *((stretch.start, 1, key) for stretch, key in uses)])
    needed = {(op.subgroup, op.needed) for op in arrivals}
    arrived: set[int] = set()
    for point, is_use, key in events:
        if not is_use:
            if len(present) == slots:
                present.remove(max(present, key=lambda one: (next_uses[one] or [float("inf")])[-1]))
            present.add(key)
            arrived.add(key)
            continue
        if key not in present:
            raise PlanError(f"policy {policy}: {what} {key} are used at point {point:.4f} and not on the device")
        if key in arrived and (key, point) not in needed:
            raise PlanError(f"policy {policy}: compute does not wait for {what} {key} at point {point:.4f}")
        arrived.discard(key)
        next_uses[key].pop()
    return frozenset(present)


def _check_activations(policy: str, ops: Sequence[Op], plan: LayerPlan, stretches: Sequence[Stretch]) -> None:
    """Check that each copied activation goes down when it is computed and is back when its backward begins."""
    bounds = {(one.activation, one.is_backward, one.round): one for one in stretches}
    down: dict[tuple[int, int], int] = {}
    back = set()
    rounds: Counter[tuple[str, int]] = Counter()
    for number, op in enumerate(ops):
        if op.kind not in ("activation down", "activation up"):
            continue
        index = op.buffer
        if not 0 <= index < len(plan.activations):
            raise PlanError(f"policy {policy}: {op.kind} of an activation that does not exist")
        turn = rounds[op.kind, index]
        rounds[op.kind, index] += 1
        use = bounds.get((index, op.kind == "activation up", turn))
        if use is None:
            raise PlanError(f"policy {policy}: {op.kind} of activation {index} is repeated")
        if op.kind == "activation down":
            down[index, turn] = number
            if op.point < use.end:
                raise PlanError(f"policy {policy}: activation {index} is copied before it is computed")
        else:
            back.add((index, turn))
            if down.get((index, turn)) not in op.after or op.needed != use.start:
                raise PlanError(f"policy {policy}: activation {index} does not come back from the host in time")
    expected = {(index, turn) for index in plan.copied for turn in range(plan.rounds)}
    if back != expected or set(down) != expected:
        raise PlanError(f"policy {policy}: activations are not copied to the host and back once each")
