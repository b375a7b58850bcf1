"""The plan for the activations of layers as orders for each layer, from what its first
passes have shown."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ebbtide.features.layers.model import (
    ACTIVATION_KINDS,
    SLOTS,
    LayerPlan,
    place,
    stretches_of,
)
from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import (
    ActivationForm,
    Layer,
    Workload,
    with_layers,
)
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

_FAST = 1e13
# No time is 0, so that plans are of this job.
LEAST_S = 1e-9


class MeasuredLayer(NamedTuple):
    """A layer in one pass: times, bytes that it saves and of its inputs, and whether it
    can be computed again."""

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    is_recomputable: bool
    weight_bytes: int = 0  # Of streamed weights, and of their gradients.
    gradient_bytes: int = 0
    # Of recomputation: of what it gives with what the forward has saved.
    comparison_s: float = 0.0

    def in_workload(self) -> Layer:
        # Tensors that two layers save count for one of them.
        forms = [
            ActivationForm("all", float(max(self.saved_bytes, self.input_bytes)), 0.0)
        ]
        again = forms[0]
        if self.is_recomputable:
            again = ActivationForm(
                "input", float(self.input_bytes), self.forward_s + self.comparison_s
            )
        # A parameter of a plan is a byte.
        return Layer(
            self.name,
            max(1, self.weight_bytes),
            self.forward_s,
            self.backward_s,
            (*forms, again),
        )


class LayerOptions(NamedTuple):
    """The choices that a plan has: `activations` and `weights` as of policies.

    Without weights, they are None.
    """

    activations: str = "auto"
    weights: str | None = None

    def policy(self, fits: bool) -> Policy:
        """Return the policy.

        `fits`: whether all layers fit, so that there is nothing to choose.
        """
        activations = (
            "keep" if fits and self.activations == "auto" else self.activations
        )
        weights = "resident" if fits and self.weights == "auto" else self.weights
        options = {"activations": activations} | (
            {"weights": weights} if weights else {}
        )
        return Policy.make("gpu-only", **options)


class PassTimes(NamedTuple):
    """Seconds of a pass outside of layers: between forward and backward, and from there
    to the next pass."""

    turn_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True)
class LayerOrders:
    """The activations of each layer, and when they move. Layers are numbers in the
    order of the forward.

    Attributes:
        plan: The plan that these orders are from; None for the orders of the first
            passes, and without a limit.
        recomputed: Layers that are computed again.
        copied: Layers whose activations go to the host; None for all.
        awaited: By layer: those whose copies to the host must have ended before its
            forward.
        returned: (layer, other): the activations of the other layer come back when the
            layer's backward has ended.
        left: Saved tensors (layer, number) that are not copied, since the job holds
            their memory itself.
        streamed: Layers whose weights come for the forward and for the backward; None
            for all. Others stay in between.
        weight_slots: Streamed layers whose weights are on the device at a time.
        predicted: The simulated iteration.
    """

    plan: Plan | None = None
    recomputed: frozenset[int] = frozenset()
    copied: frozenset[int] | None = frozenset()
    awaited: Mapping[int, frozenset[int]] = field(default_factory=dict)
    returned: Sequence[tuple[int, int]] = ()
    left: frozenset[tuple[int, int]] = frozenset()
    streamed: frozenset[int] | None = frozenset()
    weight_slots: int = SLOTS
    predicted: Schedule | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether all activations are kept."""
        return not self.recomputed and self.copied is not None and not self.copied

    def without_recomputation(self, layers: Collection[int]) -> "LayerOrders":
        """Return these orders with layers offloaded that were to be computed again."""
        if self.recomputed.isdisjoint(layers) or self.copied is None:
            return self
        others = self.recomputed.difference(layers)
        return replace(
            self, recomputed=others, copied=self.copied | (self.recomputed - others)
        )

    def is_streamed(self, layer: int) -> bool:
        return self.streamed is None or layer in self.streamed

    def is_copied(self, layer: int) -> bool:
        return self.copied is None or layer in self.copied

    def kind(self, layer: int) -> str:
        """Return one of `ACTIVATION_KINDS`. What would not have left when its backward
        begins is kept."""
        return ACTIVATION_KINDS[(layer in self.recomputed) + 2 * self.is_copied(layer)]


KEEP_ALL = LayerOrders()
# Of the first passes: it needs the least memory, and shows the bytes of all layers and
# the rates of the link.
ONE_AT_A_TIME = LayerOrders(copied=None, streamed=None, weight_slots=1)


def plan_orders(
    layers: Sequence[MeasuredLayer],
    budget_bytes: float | None,
    rates: Mapping[Direction, float | None],
    options: LayerOptions,
    outside: PassTimes,
) -> LayerOrders:
    """Return the orders of the best plan for layers within a budget of device memory.

    Where all of them fit, nothing moves. Where no plan fits, they go through the device
    one at a time."""
    machine = machine_of_rates(rates)
    fits = (
        budget_bytes is None
        or sum(layer.saved_bytes + layer.weight_bytes for layer in layers)
        <= budget_bytes
    )
    workload = workload_of_layers(
        layers, None if fits else budget_bytes, machine, options, outside
    )
    if options.activations not in ("keep", "offload") and not any(
        layer.is_recomputable for layer in layers
    ):
        options = options._replace(
            activations="keep" if options.activations == "recompute" else "offload"
        )
    plan = options.policy(fits).plan(workload, machine)
    assert plan.layers is not None
    placed = place(workload, plan.layers)
    if placed.missing_bytes:
        return ONE_AT_A_TIME
    return replace(
        orders_of_plan(plan, plan.layers, placed),
        predicted=simulate(plan, placed, machine),
    )


def machine_of_rates(rates: Mapping[Direction, float | None]) -> Machine:
    return Machine(
        name="this machine",
        h2d_bytes_per_s=rates.get("h2d") or _FAST,
        d2h_bytes_per_s=rates.get("d2h") or _FAST,
        host_memory_bytes_per_s=_FAST,
        gpu_update_params_per_s=_FAST,
    )


def workload_of_layers(
    layers: Sequence[MeasuredLayer],
    budget_bytes: float | None,
    machine: Machine,
    options: LayerOptions,
    outside: PassTimes,
) -> Workload:
    """Return a job of these layers alone.

    Its optimizer has no state on the device, and takes no time there.

    Weights count as one byte of each layer where they are not streamed."""
    in_workload = [layer.in_workload() for layer in layers]
    extra_bytes = sum(not layer.weight_bytes for layer in layers)
    weight_bytes = sum(layer.params for layer in in_workload)
    gradient_bytes = sum(layer.gradient_bytes for layer in layers) / weight_bytes
    total = Workload(
        name="this job",
        params=weight_bytes,
        subgroup_params=weight_bytes,
        forward_s=sum(layer.forward_s for layer in in_workload) + outside.turn_s,
        backward_s=sum(layer.backward_s for layer in in_workload),
        other_s=outside.other_s,
        param_bytes=1.0,
        grad_bytes=0.0,
        state_bytes=0.0,
        gpu_free=None if budget_bytes is None else ((0.0, budget_bytes + extra_bytes),),
        clipping=False,
        host_gradient_bytes=gradient_bytes if options.weights else None,
    )
    return with_layers(total, in_workload, 1, "this job")


def orders_of_plan(plan: Plan, layers: LayerPlan, placed: Workload) -> LayerOrders:
    """Translate the operations of a plan.

    Points of the iteration become layers whose compute starts or ends there.
    """
    stretches = stretches_of(placed, layers)
    starts = {one.start: one.layer for one in stretches if not one.is_backward}
    ends = {one.end: one.layer for one in stretches if one.is_backward}
    awaited: dict[int, frozenset[int]] = {}
    returned = []
    for op in plan.ops:
        if op.kind == "activation down" and op.holds is not None:
            taker = starts[op.holds.point]
            awaited[taker] = awaited.get(taker, frozenset()) | {op.subgroup}
        elif op.kind == "activation up":
            returned.append((ends[op.start], op.subgroup))
    recomputed = (
        layer for layer, saved in enumerate(layers.activations) if saved.recompute_s
    )
    return LayerOrders(
        plan,
        frozenset(recomputed),
        frozenset(layers.copied),
        awaited,
        returned,
        streamed=layers.streamed,
        weight_slots=layers.weight_slots,
    )
