"""The plan for the activations of layers as orders for each layer, from what its first passes have shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.model.layers import LayerPlan, place, stretches_of
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import ActivationForm, Layer, Workload, with_layers
from ebbtide.interleave.policies import make_plan
from ebbtide.machines.machine import Machine

# Weights and state of these layers stay, and count as one parameter for each layer: what they use is in the budget.
_PARAM_BYTES = 16 + 2 + 2
_FAST = 1e13


class MeasuredLayer(NamedTuple):
    """A layer in one pass: times, bytes that it saves and of its inputs, and whether it can be computed again."""

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    is_recomputable: bool

    def in_workload(self) -> Layer:
        # Tensors that two layers save count for one of them.
        forms = [ActivationForm("all", float(max(self.saved_bytes, self.input_bytes)), 0.0)]
        again = ActivationForm("input", float(self.input_bytes), self.forward_s) if self.is_recomputable else forms[0]
        return Layer(self.name, 1, self.forward_s, self.backward_s, (*forms, again))


@dataclass(frozen=True)
class LayerOrders:
    """The activations of each layer, and when they move. Layers are numbers in the order of the forward.

    Attributes:
        plan: The plan that these orders are from; None for those of the first passes, and without a limit.
        recomputed: Layers that are computed again.
        copied: Layers whose activations go to the host; None for all.
        awaited: By layer: those whose copies to the host must have ended before its forward.
        returned: (layer, other): the activations of the other layer come back when the layer's backward has ended.
        left: Saved tensors (layer, number) that are not copied, since the job holds their memory itself.
    """

    plan: Plan | None = None
    recomputed: frozenset[int] = frozenset()
    copied: frozenset[int] | None = frozenset()
    awaited: Mapping[int, frozenset[int]] = field(default_factory=dict)
    returned: Sequence[tuple[int, int]] = ()
    left: frozenset[tuple[int, int]] = frozenset()

    def is_copied(self, layer: int) -> bool:
        return self.copied is None or layer in self.copied

    def kind(self, layer: int) -> str:
        """Return `keep`, `recompute` or `offload`. What would not have left when its backward begins is kept."""
        return "recompute" if layer in self.recomputed else "offload" if self.is_copied(layer) else "keep"


KEEP_ALL = LayerOrders()
# Of the first passes: it needs the least memory, and shows the bytes of all layers and the rates of the link.
ONE_AT_A_TIME = LayerOrders(copied=None)


def plan_orders(
    layers: Sequence[MeasuredLayer], budget_bytes: float | None, rates: Mapping[Direction, float | None]
) -> LayerOrders:
    """Return the orders of the best plan for layers within a budget of device memory.

    Where all of them fit, nothing is offloaded. Where no plan fits, they go through the device one at a time."""
    if budget_bytes is None or sum(layer.saved_bytes for layer in layers) <= budget_bytes:
        return KEEP_ALL
    workload = workload_of_layers(layers, budget_bytes)
    kinds = "auto" if any(layer.is_recomputable for layer in layers) else "offload"
    plan = make_plan(f"gpu-only,activations={kinds}", workload, machine_of_rates(rates))
    assert plan.layers is not None
    placed = place(workload, plan.layers)
    fits = max(memory.activations for memory in placed.layer_memory) <= budget_bytes
    return orders_of_plan(plan, plan.layers, placed) if fits else ONE_AT_A_TIME


def machine_of_rates(rates: Mapping[Direction, float | None]) -> Machine:
    return Machine(
        name="this machine",
        h2d_bytes_per_s=rates.get("h2d") or _FAST,
        d2h_bytes_per_s=rates.get("d2h") or _FAST,
        host_memory_bytes_per_s=_FAST,
        gpu_update_params_per_s=_FAST,
    )


def workload_of_layers(layers: Sequence[MeasuredLayer], budget_bytes: float) -> Workload:
    total = Workload(
        name="this job",
        params=len(layers),
        subgroup_params=1,
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        gpu_free=((0.0, budget_bytes + _PARAM_BYTES * len(layers)),),
        clipping=False,
    )
    return with_layers(total, [layer.in_workload() for layer in layers], 1, "this job")


def orders_of_plan(plan: Plan, layers: LayerPlan, placed: Workload) -> LayerOrders:
    """Translate the operations of a plan: points of the iteration become layers whose compute starts or ends there."""
    stretches = stretches_of(placed, layers)
    starts = {one.start: one.layer for one in stretches if not one.is_backward}
    ends = {one.end: one.layer for one in stretches if one.is_backward}
    awaited: dict[int, frozenset[int]] = {}
    returned = []
    for op in plan.ops:
        if op.kind == "activation down" and op.needed is not None:
            taker = starts[op.needed]
            awaited[taker] = awaited.get(taker, frozenset()) | {op.subgroup}
        elif op.kind == "activation up":
            returned.append((ends[op.point], op.subgroup))
    recomputed = (layer for layer, saved in enumerate(layers.activations) if saved.recompute_s and not saved.offloaded)
    return LayerOrders(plan, frozenset(recomputed), frozenset(layers.copied), awaited, returned)
