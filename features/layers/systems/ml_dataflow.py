"""ml_dataflow: everything of all layers is streamed, and the GPU updates.

Everything means weights, gradients, activations and state.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_operations import LayerOperations
from ebbtide.features.layers.model import LayerPlan, SavedActivation, Stretch, place
from ebbtide.interleave.model.operations import STEP, UPDATE, Op, OpKind
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Policy, system
from ebbtide.machines.machine import Machine


@system("ml-dataflow", without=("layers", "storage"))
def ml_dataflow(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Stream weights, gradients, activations and state of each layer, and update on the
    GPU, as ml_dataflow does.

    A round has as many chunks as make the activations of a layer as large as its
    weights. The device holds as many layers, with gradients and activations, as it has
    memory for; activations on the host are kept in the largest forms that it has memory
    for."""
    policy.reject_value()
    if not workload.layers or workload.gpu_free is None:
        raise PolicyError(
            f"{policy.text!r} needs a workload with layers, and to know what device "
            "memory is free"
        )
    if any(layer.frozen_bytes for layer in workload.layers):
        raise PolicyError(f"{policy.text!r} trains all weights: layers are frozen")
    rounds = _rounds(workload)
    slots = slots_in(workload, rounds)
    layers = dataflow_layers(
        workload, rounds, slots, _forms(workload, machine, rounds, slots)
    )
    return dataflow_plan(policy.text, workload, layers)


class Slots(NamedTuple):
    """The number of slots that the device has at a time for layers' weights, layers'
    gradients and chunks' activations."""

    weights: int
    gradients: int
    activations: int


def _rounds(workload: Workload) -> int:
    """Return the fewest rounds, all alike, for activations of a fitting size.

    The activations of a layer are about as large as its weights.
    """
    layer, count = workload.layers[0], len(workload.chunk_shares)
    wanted = max(
        1, round(workload.param_bytes * layer.params / (layer.forms[0].nbytes / count))
    )
    return next(
        rounds
        for rounds in range(1, count + 1)
        if count % rounds == 0 and count // rounds <= wanted
    )


def slots_in(workload: Workload, rounds: int) -> Slots:
    """Return the slots that the device has memory for.

    Whole layers come first, then one more layer's weights, then activations.
    """
    layers, chunks = workload.layers, len(workload.chunk_shares) // rounds
    weights, gradients = (
        width * max(layer.params for layer in layers)
        for width in (workload.param_bytes, workload.grad_bytes)
    )
    activation = max(layer.forms[0].nbytes for layer in layers) / rounds / chunks
    free = workload.min_free_bytes or 0.0
    whole = min(len(layers), int(free / (weights + gradients + chunks * activation)))
    if not whole:
        return Slots(
            1,
            1,
            max(
                1,
                min(
                    int((free - weights - gradients) / activation), len(layers) * chunks
                ),
            ),
        )
    left = free - whole * (weights + gradients + chunks * activation)
    another = whole < len(layers) and left > weights
    left -= weights * another
    activations = min(len(layers) * chunks, whole * chunks + int(left / activation))
    return Slots(whole + another, whole, activations)


def _forms(
    workload: Workload, machine: Machine, rounds: int, slots: Slots
) -> list[int]:
    """Return how many activations on the host are kept in each form.

    The next larger form is for as many as fit, when all are in the one before.
    """
    sizes = [
        form.nbytes / len(workload.chunk_shares) for form in workload.layers[0].forms
    ]
    count = (
        len(workload.layers) * len(workload.chunk_shares) // rounds - slots.activations
    )
    limit = available_host_bytes(workload, machine)
    numbers = [0] * len(sizes)
    numbers[0 if limit is None else -1] = count
    if limit is None:
        return numbers
    # Weights, gradients and state of all layers are on the host.
    per_param = workload.param_bytes + workload.grad_bytes + workload.state_bytes
    left = (
        limit
        - per_param * sum(layer.params for layer in workload.layers)
        - count * sizes[-1]
    )
    for form in reversed(range(len(sizes) - 1)):
        growth = sizes[form] - sizes[form + 1]
        upgraded = (
            min(numbers[form + 1], max(0, int(left / growth))) if growth > 0 else 0
        )
        numbers[form + 1] -= upgraded
        numbers[form] = upgraded
        left -= growth * upgraded
    return numbers


def dataflow_layers(
    workload: Workload, rounds: int, slots: Slots, numbers: Sequence[int]
) -> LayerPlan:
    """Return the plan for the layers; `numbers`: activations on the host in each form.
    The last stay on the device."""
    layers, chunks = workload.layers, len(workload.chunk_shares) // rounds
    forms = _spread(numbers, len(layers) * chunks - slots.activations, chunks)
    forms += [0] * (len(layers) * chunks - len(forms))
    shares = [share * rounds for share in workload.chunk_shares[:chunks]]
    activations = []
    for index, number in enumerate(forms):
        form, share = layers[index // chunks].forms[number], shares[index % chunks]
        activations.append(
            SavedActivation(
                form.nbytes / rounds * share, form.recompute_s * share, True
            )
        )
    every = frozenset(range(len(layers)))
    return LayerPlan(
        every,
        tuple(activations),
        slots.weights,
        slots.activations,
        slots.gradients,
        rounds,
    )


def _spread(numbers: Sequence[int], count: int, chunks: int) -> list[int]:
    """Return the form of each activation on the host: the smallest for the first chunks
    of every layer, the rest in turns."""
    smallest, others = len(numbers) - 1, [*numbers[:-1]]
    forms: list[int | None] = [None] * count
    order = sorted(range(count), key=lambda index: (index % chunks, index // chunks))
    for index in order[: numbers[smallest]]:
        forms[index] = smallest
    rest = [index for index, form in enumerate(forms) if form is None]
    done = [0] * len(others)
    for position, index in enumerate(rest, 1):
        # The form that is furthest behind its share so far.
        form = max(
            range(len(others)),
            key=lambda one: others[one] * position / len(rest) - done[one],
        )
        done[form] += 1
        forms[index] = form
    return [form or 0 for form in forms]


def dataflow_plan(text: str, workload: Workload, layers: LayerPlan) -> Plan:
    """Return the plan with the operations of all rounds and of the update."""
    placed = place(workload, layers)
    operations = _DataflowOperations(placed, layers)
    kept = (
        frozenset(range(min(layers.gradient_slots, len(placed.layers))))
        | operations.rest
    )
    ops = tuple(operations.run())
    resident_bytes = placed.state_bytes * sum(
        placed.subgroups[subgroup] for subgroup in operations.rest
    )
    plan = Plan(
        text,
        ops,
        len(placed.subgroups),
        operations.rest,
        frozenset(),
        kept,
        resident_bytes,
        layers=layers,
    )
    return plan.validate(placed)


class _DataflowOperations(LayerOperations):
    """The operations in the order in which they are issued.

    Each resource waits for the first one.
    """

    def __init__(self, workload: Workload, plan: LayerPlan) -> None:
        super().__init__(workload, plan, in_order=True)
        count, subgroups = len(workload.layers), len(workload.subgroups)
        if workload.subgroups[:count] != tuple(
            layer.params for layer in workload.layers
        ):
            raise PolicyError(
                "ml-dataflow needs subgroups that are whole layers: leave "
                "subgroup_params and sizes out"
            )
        self.rest = frozenset(range(count, subgroups))
        self._gradients_down: dict[int, int] = {}

    def run(self) -> list[Op]:
        """Return all operations."""
        for stretch, is_last in zip(self.stretches, self.is_last, strict=True):
            self.move_activation(stretch)
            if not is_last:
                continue
            if stretch.is_backward:
                self._send_gradient(stretch)
            self.fetch_weights(stretch)
            self._fetch_gradient(stretch)
        self._update()
        return self.ops

    def _send_gradient(self, stretch: Stretch) -> None:
        """Copy a gradient to the host.

        Gradients of the first layers stay on the device before the update.
        """
        layer, slots = stretch.layer, self._plan.gradient_slots
        is_last_round = stretch.round == self._plan.rounds - 1
        if is_last_round and layer < slots:
            return
        taker = layer - slots
        # In the first round there is nothing to add to: its slot is free when it has
        # been copied.
        needed = (
            self._layer_uses[True, stretch.round, taker]
            if taker >= 0 and not stretch.round
            else None
        )
        kind: OpKind = "gradient down" if is_last_round else "layer gradient down"
        size = self._workload.grad_bytes * self._workload.layers[layer].params
        self._gradients_down[layer] = self.add(
            kind, "d2h", layer, size, stretch.end, needed
        )

    def _fetch_gradient(self, stretch: Stretch) -> None:
        """Copy a gradient of the rounds before into a slot, when it is free.

        The last layers' gradients come within the forward.
        """
        count, slots = len(self._workload.layers), self._plan.gradient_slots
        if not stretch.round:
            return
        if stretch.is_backward:
            layer = stretch.layer - slots
            if layer < 0:
                return
            after: tuple[int, ...] = (self._gradients_down[stretch.layer],)
        else:
            from_last = stretch.layer - (count - self._plan.weight_slots)
            if not 0 <= from_last < slots:
                return
            layer, after = count - 1 - from_last, ()
        size = self._workload.grad_bytes * self._workload.layers[layer].params
        self.add(
            "layer gradient up",
            "h2d",
            layer,
            size,
            stretch.end,
            self._layer_uses[True, stretch.round, layer],
            after,
        )

    def _update(self) -> None:
        """Update layer by layer.

        Each waits until the one before is on the host again, and frees slots for
        others.
        """
        workload, slots = self._workload, self._plan
        layers, width = workload.layers, workload.state_bytes
        clip: tuple[int, ...] = ()
        if workload.clipping:
            clip = (
                self.add(
                    "clip", "cpu", -1, 0.0, STEP, after=self._gradients_down.values()
                ),
            )
        largest = width * max(layer.params for layer in layers)
        saved = sorted((one.nbytes for one in slots.activations), reverse=True)[
            : slots.activation_slots
        ]
        states = min(len(layers), max(1, int(sum(saved) / largest)))
        inputs: dict[int, list[int]] = {layer: [*clip] for layer in range(len(layers))}

        def fetch(layer: int, updated: Iterable[int]) -> None:
            inputs[layer].append(
                self.add(
                    "fetch",
                    "h2d",
                    layer,
                    width * layers[layer].params,
                    UPDATE,
                    after=updated,
                )
            )

        for layer in range(states):
            fetch(layer, ())
        flushed: tuple[int, ...] = ()
        for layer in range(len(layers)):
            after = (*inputs[layer], *flushed)
            update = self.add(
                "update",
                "gpu",
                layer,
                0.0,
                UPDATE,
                after=after,
                params=layers[layer].params,
            )
            size = workload.param_bytes * layers[layer].params
            flushed = (
                self.add(
                    "flush",
                    "d2h",
                    layer,
                    width * layers[layer].params + size,
                    UPDATE,
                    after=(update,),
                ),
            )
            if (other := layer + slots.weight_slots) < len(layers):
                inputs[other].append(
                    self.add(
                        "weights up",
                        "h2d",
                        other,
                        self._weight_bytes[other],
                        UPDATE,
                        after=(update,),
                    )
                )
            if (other := layer + slots.gradient_slots) < len(layers):
                down = self._gradients_down[other]
                size = workload.grad_bytes * layers[other].params
                inputs[other].append(
                    self.add(
                        "gradient up",
                        "h2d",
                        other,
                        size,
                        UPDATE,
                        after=(update, down, *clip),
                    )
                )
            if (other := layer + states) < len(layers):
                fetch(other, (update,))
        for subgroup in self.rest:
            self.add(
                "update",
                "gpu",
                subgroup,
                0.0,
                UPDATE,
                after=clip,
                params=workload.subgroups[subgroup],
            )
