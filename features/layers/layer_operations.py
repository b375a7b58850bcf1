"""The operations of a plan on the weights and activations of layers, beside the
optimizer's."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from ebbtide.features.layers.model import LayerPlan, Stretch, stretches_of
from ebbtide.interleave.model.operations import (
    FORWARD,
    UPDATE,
    Hold,
    Op,
    OpKind,
    Resource,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload


class LayerOperations:
    """Collects the operations of a plan on layers of a placed workload, in the order in
    which each resource runs them.

    `stretches`: the compute of all rounds; `is_last`: whether each is the last of its
    layer before another one."""

    def __init__(
        self, workload: Workload, plan: LayerPlan, in_order: bool = False
    ) -> None:
        """Initialize.

        `in_order`: each resource waits for the first of its operations, even if others
        are ready.
        """
        self._workload = workload
        self._plan = plan
        self._weight_bytes = workload.streamed_bytes
        self._last: dict[Resource, int] | None = {} if in_order else None
        self.stretches: list[Stretch] = stretches_of(workload, plan)
        following = [*self.stretches[1:], None]
        self.is_last = [
            after is None or after[:3] != one[:3]
            for one, after in zip(self.stretches, following, strict=True)
        ]
        # When compute uses each activation, and first uses each layer, by direction and
        # round.
        self._uses = {
            (one.is_backward, one.round, one.activation): one.start
            for one in self.stretches
        }
        self._layer_uses = {
            (one.is_backward, one.round, one.layer): one.start
            for one in reversed(self.stretches)
        }
        self._streamed = sorted(plan.streamed)
        self._offloaded = plan.offloaded
        self._position = {
            index: position for position, index in enumerate(self._offloaded)
        }
        self._downs: dict[int, int] = {}
        # Copies to the device wait for these.
        self._first: set[int] = set()
        self.ops: list[Op] = []

    def add(
        self,
        kind: OpKind,
        resource: Resource,
        layer: int,
        nbytes: float,
        start: float,
        needed: float | None = None,
        after: Iterable[int] = (),
        activation: int | None = None,
        params: int = 0,
    ) -> int:
        """Append an operation and return its index.

        `needed` is the point at which compute waits for it.
        """
        holds = None if needed is None else Hold(needed)
        inputs = {*after, *self._first} if resource == "h2d" else set(after)
        if self._last is not None:
            inputs |= {self._last[resource]} if resource in self._last else set()
            self._last[resource] = len(self.ops)
        self.ops.append(
            Op(
                kind,
                resource,
                layer,
                params,
                nbytes,
                start,
                tuple(sorted(inputs)),
                holds=holds,
                tag=activation,
            )
        )
        return len(self.ops) - 1

    def run(self) -> list[Op]:
        """Return the operations of weights and activations in all rounds."""
        for stretch, is_last in zip(self.stretches, self.is_last, strict=True):
            self.move_activation(stretch)
            if is_last:
                self.fetch_weights(stretch)
        return self.ops

    def move_activation(self, stretch: Stretch) -> None:
        """Copy the activations that a forward has computed to the host.

        Or copy what is needed next into the slot that a backward frees.
        """
        position, slots = (
            self._position.get(stretch.activation),
            self._plan.activation_slots,
        )
        if position is None:
            return
        if not stretch.is_backward:
            if position + slots < len(self._offloaded):
                taker = self._uses[
                    False, stretch.round, self._offloaded[position + slots]
                ]
                nbytes = self._plan.activations[stretch.activation].nbytes
                self._downs[stretch.activation] = self.add(
                    "activation down",
                    "d2h",
                    stretch.layer,
                    nbytes,
                    stretch.end,
                    taker,
                    activation=stretch.activation,
                )
        elif position >= slots:
            index = self._offloaded[position - slots]
            use, nbytes = (
                self._uses[True, stretch.round, index],
                self._plan.activations[index].nbytes,
            )
            layer = index * len(self._weight_bytes) // len(self._plan.activations)
            self.add(
                "activation up",
                "h2d",
                layer,
                nbytes,
                stretch.end,
                use,
                (self._downs[index],),
                index,
            )

    def fetch_weights(self, stretch: Stretch) -> None:
        """Copy the weights that are needed next into the slot of a finished layer.

        The layer is a streamed one.
        """
        if stretch.layer not in self._plan.streamed:
            return
        slots = self._plan.weight_slots
        position = self._streamed.index(stretch.layer) + (
            -slots if stretch.is_backward else slots
        )
        if 0 <= position < len(self._streamed):
            layer = self._streamed[position]
            use = self._layer_uses[stretch.is_backward, stretch.round, layer]
            self.add(
                "weights up", "h2d", layer, self._weight_bytes[layer], stretch.end, use
            )


class HostWeightOperations(LayerOperations):
    """Operations for weights that come from the host before each forward.

    All layers' weights come, and gradients go there while compute waits, as with
    `stream_weights`. Resident layers then have their weights until the backward.
    """

    def run(self) -> list[Op]:
        for before in range(self._plan.weight_slots):
            self._fetch_for_forward(before, FORWARD)
        return super().run()

    def move_activation(self, stretch: Stretch) -> None:
        layer, each = stretch.layer, self._workload.host_gradient_bytes
        if stretch.is_backward and each:
            nbytes = each * self._workload.layers[layer].params
            # What comes next is issued when compute goes on.
            self._first = {
                self.add(
                    "layer gradient down",
                    "d2h",
                    layer,
                    nbytes,
                    stretch.end,
                    stretch.end,
                )
            }
        super().move_activation(stretch)

    def fetch_weights(self, stretch: Stretch) -> None:
        if stretch.is_backward:
            super().fetch_weights(stretch)
        elif stretch.layer in self._plan.streamed:
            self._fetch_for_forward(
                self._streamed.index(stretch.layer) + self._plan.weight_slots,
                stretch.end,
            )

    def _fetch_for_forward(self, before: int, point: float) -> None:
        """Copy the weights of the layers with `before` streamed layers before them."""
        for layer, nbytes in enumerate(self._weight_bytes):
            if bisect_left(self._streamed, layer) == before:
                self.add(
                    "weights up",
                    "h2d",
                    layer,
                    nbytes,
                    point,
                    self._layer_uses[False, 0, layer],
                )


def with_layer_operations(
    plan: Plan,
    placed: Workload,
    layers: LayerPlan,
    operations: LayerOperations | None = None,
) -> Plan:
    """Return a plan with the operations of a plan for layers first, not validated.

    Parameters of streamed layers stay on, or are copied to, the host unless they stay
    on the device for the next forward.
    """
    from_host = placed.host_gradient_bytes is not None
    ops = (
        operations
        or (HostWeightOperations if from_host else LayerOperations)(placed, layers)
    ).run()
    first = len(ops)
    layer_of = placed.layers_of_subgroups
    streamed = sorted(layers.streamed)
    # Layers whose trained weights are on the host, too.
    written_back = frozenset(
        layer
        for layer in streamed
        if not placed.layers[layer].keeps_trained(placed.param_bytes)
    )
    evicted = written_back.intersection(streamed[layers.weight_slots :])
    backward_starts = {
        one.layer: one.start
        for one in reversed(stretches_of(placed, layers))
        if one.is_backward
    }
    # By the index of its update on the GPU: each subgroup whose parameters are to be
    # copied to the host.
    written: dict[int, Op] = {}
    for op in plan.ops:
        layer = layer_of[op.subgroup] if op.subgroup >= 0 else -1
        after, nbytes, holds = (
            tuple([first + index for index in op.after]),
            op.nbytes,
            op.holds,
        )
        if op.kind == "upload" and layer in evicted:
            nbytes = 0.0
        # Parameters after all layers, and their gradients, have memory of their own.
        taker = layer - layers.gradient_slots if layer < len(placed.layers) else -1
        if (
            op.kind == "gradient down"
            and not op.is_blocking
            and taker >= 0
            and op.start < UPDATE
        ):
            holds = Hold(max(backward_starts[taker], op.start))
        if (
            op.kind == "update"
            and op.resource == "gpu"
            and layer in written_back
            and not from_host
        ):
            written[len(ops)] = op
        if (
            op.kind == "flush"
            and (update := next((index for index in after if index in written), None))
            is not None
        ):
            nbytes += placed.param_bytes * written.pop(update).params
        ops.append(op._replace(nbytes=nbytes, after=after, holds=holds))
    for index, op in written.items():
        nbytes = placed.param_bytes * op.params
        ops.append(
            Op(
                "weights down",
                "d2h",
                layer_of[op.subgroup],
                0,
                nbytes,
                op.start,
                (index,),
            )
        )
    return replace(plan, ops=tuple(ops), layers=layers)
