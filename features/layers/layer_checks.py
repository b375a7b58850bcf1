"""Checks of the operations of a plan on layers.

Weights and activations must be on the device when compute uses them.
"""

from collections.abc import Iterable, Sequence

from ebbtide.errors import PlanError
from ebbtide.features.layers.kinds import LAYER_KINDS
from ebbtide.features.layers.model import LayerPlan, Stretch, stretches_of
from ebbtide.interleave.model.operations import UPDATE, Hold, Op
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload


def check_layers(plan: Plan, workload: Workload) -> None:
    """Check that compute uses only weights and activations on the device, in no more
    slots than there are.

    The workload is a placed one. Raises PlanError.
    """
    policy, ops, layers = plan.policy, plan.ops, plan.layers
    on_layers = [op for op in ops if op.kind in LAYER_KINDS]
    if layers is None:
        if on_layers:
            raise PlanError(
                f"policy {policy}: {on_layers[0].kind} without a plan for layers"
            )
        return
    stretches = stretches_of(workload, layers)
    streamed = [stretch for stretch in stretches if stretch.layer in layers.streamed]
    # Later ones are for an update on the GPU, which frees them again.
    arrivals = [op for op in on_layers if op.kind == "weights up" and op.start < UPDATE]
    first = at_start = sorted(layers.streamed)[: layers.weight_slots]
    if workload.host_gradient_bytes is not None:
        at_start = []
        others = [op for op in arrivals if op.subgroup not in layers.streamed]
        arrivals = [op for op in arrivals if op.subgroup in layers.streamed]
        resident = [
            stretch for stretch in stretches if stretch.layer not in layers.streamed
        ]
        _walk(policy, resident, others, [], len(resident))
    if _walk(policy, streamed, arrivals, at_start, layers.weight_slots) != frozenset(
        first
    ):
        raise PlanError(
            f"policy {policy}: weights of the first layers are not on the device when "
            "the iteration ends"
        )
    _check_activations(policy, ops, layers, stretches)


def _walk(
    policy: str,
    uses: Sequence[Stretch],
    arrivals: Iterable[Op],
    at_start: Iterable[int],
    slots: int,
) -> frozenset[int]:
    """Walk through uses of weights that pass through slots.

    Return the layers whose weights are there at the end.

    An arrival takes the slot of what is used last of all. Each starts when that slot is
    free."""
    next_uses: dict[int, list[float]] = {}
    for use in reversed(uses):
        next_uses.setdefault(use.layer, []).append(use.start)
    present = set(at_start)
    # An arrival at a point follows uses that end there.
    events = sorted(
        [(op.start, 0, op.subgroup) for op in arrivals]
        + [(use.start, 1, use.layer) for use in uses]
    )
    needed = {(op.subgroup, op.holds and op.holds.point) for op in arrivals}
    arrived: set[int] = set()
    for point, is_use, layer in events:
        if not is_use:
            if len(present) == slots:
                present.remove(
                    max(present, key=lambda one: (next_uses[one] or [float("inf")])[-1])
                )
            present.add(layer)
            arrived.add(layer)
            continue
        where = f"weights of layer {layer} at point {point:.4f}"
        if layer not in present:
            raise PlanError(
                f"policy {policy}: compute uses {where}, and they are not on the device"
            )
        if layer in arrived and (layer, point) not in needed:
            raise PlanError(f"policy {policy}: compute does not wait for {where}")
        arrived.discard(layer)
        next_uses[layer].pop()
    return frozenset(present)


def _check_activations(
    policy: str, ops: Sequence[Op], plan: LayerPlan, stretches: Sequence[Stretch]
) -> None:
    """Check that each copied activation goes down when it is computed and is back when
    its backward begins."""
    copied = frozenset(plan.copied)
    # By kind and activation: what is left of its rounds, the last one first.
    uses: dict[tuple[str, int], list[Stretch]] = {}
    for one in reversed(stretches):
        if one.activation in copied:
            kind = "activation up" if one.is_backward else "activation down"
            uses.setdefault((kind, one.activation), []).append(one)
    for op in ops:
        if op.kind not in ("activation down", "activation up"):
            continue
        left = uses.get((op.kind, op.tag))
        if not left:
            raise PlanError(
                f"policy {policy}: {op.kind} of activation {op.tag} is repeated, or "
                "not to be copied"
            )
        use = left.pop()
        if not use.is_backward and op.start < use.end:
            raise PlanError(
                f"policy {policy}: activation {op.tag} is copied before it is computed"
            )
        if use.is_backward and op.holds != Hold(use.start):
            raise PlanError(
                f"policy {policy}: activation {op.tag} does not come back from the "
                "host in time"
            )
    if any(uses.values()):
        raise PlanError(
            f"policy {policy}: activations are not copied to the host and back once "
            "each"
        )
