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
    """A layer in one pass.

    Attributes:
        saved_bytes: Device memory of what it saves for the backward.
        input_bytes: Device memory of its inputs, which recomputation needs.
        is_recomputable: Whether computing it again has no other effects.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    is_recomputable: bool


@dataclass(frozen=True)
class LayerOrders:
    """What is done with the activations of each layer, and when. Layers are numbers in the order of the forward.

    Attributes:
        plan: The plan that these orders are from; None for those of the first passes, and without a limit.
        recomputed: Layers that are computed again.
        copied: Layers whose activations go to the host; None for all.
        awaited: By layer: those whose copies to the host must have ended before its forward.
        left: Saved tensors (layer, number) that are not copied, since the job holds their memory itself.
        returned: (layer, other): the activations of the other layer come back when the layer's backward has ended.
    """

    plan: Plan | None = None
    recomputed: frozenset[int] = frozenset()
    copied: frozenset[int] | None = frozenset()
    awaited: Mapping[int, frozenset[int]] = field(default_factory=dict)
    returned: Sequence[tuple[int, int]] = ()
    left: frozenset[tuple[int, int]] = frozenset()

    def is_copied(self, layer: int) -> bool:
        return self.copied is None or layer in self.copied

    @property
    def keeps_all(self) -> bool:
        return self.copied is not None and not self.copied and not self.recomputed

    def kinds(self, layers: int) -> list[str]:
        """Return `keep`, `recompute` or `offload` for each layer.

        A layer that is offloaded in the plan, and whose activations have not left when its backward begins, is kept."""
        return [
            "recompute" if layer in self.recomputed else "offload" if self.is_copied(layer) else "keep"
            for layer in range(layers)
        ]


KEEP_ALL = LayerOrders()
# Of the first passes: it needs the least memory, and shows the bytes of all layers and the rates of the link.
ONE_AT_A_TIME = LayerOrders(copied=None)


def plan_orders(
    layers: Sequence[MeasuredLayer], budget_bytes: float | None, rates: Mapping[Direction, float | None]
) -> LayerOrders:
    """Return the orders of the best plan for layers within a budget of device memory.

    Where all of them fit, nothing is offloaded. Where no plan fits, they go through the device one at a time."""
    workload = _workload(layers, budget_bytes)
    if budget_bytes is None or sum(layer.saved_bytes for layer in layers) <= budget_bytes:
        return KEEP_ALL
    machine = _machine(rates)
    can_recompute = any(layer.is_recomputable for layer in layers)
    plan = make_plan(f"gpu-only,activations={'auto' if can_recompute else 'offload'}", workload, machine)
    assert plan.layers is not None
    placed = place(workload, plan.layers)
    fits = max(memory.activations for memory in placed.layer_memory) <= budget_bytes
    return _orders(plan, plan.layers, placed) if fits else ONE_AT_A_TIME


def _machine(rates: Mapping[Direction, float | None]) -> Machine:
    return Machine(
        name="this machine",
        h2d_bytes_per_s=rates.get("h2d") or _FAST,
        d2h_bytes_per_s=rates.get("d2h") or _FAST,
        host_memory_bytes_per_s=_FAST,
        gpu_update_params_per_s=_FAST,
    )


def _workload(layers: Sequence[MeasuredLayer], budget_bytes: float | None) -> Workload:
    total = Workload(
        name="this job",
        params=len(layers),
        subgroup_params=1,
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        gpu_free=None if budget_bytes is None else ((0.0, budget_bytes + _PARAM_BYTES * len(layers)),),
        clipping=False,
    )
    return with_layers(total, [_layer(layer) for layer in layers], 1, "this job")


def _layer(layer: MeasuredLayer) -> Layer:
    # The least that is kept: tensors that two layers save count for one of them.
    everything = float(max(layer.saved_bytes, layer.input_bytes))
    forms = [ActivationForm("all", everything, 0.0)]
    if layer.is_recomputable:
        forms.append(ActivationForm("input", float(layer.input_bytes), layer.forward_s))
    else:
        forms.append(forms[0])
    return Layer(layer.name, 1, layer.forward_s, layer.backward_s, tuple(forms))


def _orders(plan: Plan, layers: LayerPlan, placed: Workload) -> LayerOrders:
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
