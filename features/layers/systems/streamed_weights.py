"""Systems that keep all weights on the host and update there: MegaTrain, RoundPipe, and
DeepSpeed's `offload_param`."""

from dataclasses import replace

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_operations import (
    LayerOperations,
    with_layer_operations,
)
from ebbtide.features.layers.model import (
    LayerPlan,
    SavedActivation,
    Stretch,
    place,
    saved_activations,
)
from ebbtide.interleave.model.operations import (
    CLIPPING_FIRST,
    OWN_GRADIENT,
    STEP,
    Departures,
)
from ebbtide.interleave.model.plan import OTHER, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Policy, system
from ebbtide.machines.machine import Machine

# MegaTrain's default of checkpoint_interval: layers of a block, whose input is kept.
_BLOCK = 4


@system("megatrain", without=("layers", "storage"))
def megatrain(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Stream all weights, keep the input of every fourth layer, and update on the CPU
    after the backward, as MegaTrain does.

    The backward computes the forward of each block of four layers again, which keeps
    the inputs of its layers, and then the forward of each layer, with gradients:
    weights cross the link three times in each micro-batch."""
    _check(workload, policy)
    inputs = [layer.forms[-1].nbytes for layer in workload.layers]
    blocks = range(0, len(inputs), _BLOCK)
    # Inputs of one block are on the device beside those that are kept, and count as the
    # first one's.
    beside = max(
        sum(inputs[first : first + _BLOCK]) - inputs[first] for first in blocks
    )
    kept = [size if layer in blocks else 0.0 for layer, size in enumerate(inputs)]
    kept[0] += beside
    shares, rounds = workload.chunk_shares, len(workload.chunk_shares)
    # All micro-batches are alike.
    activations = tuple(
        SavedActivation(size / rounds, 2 * layer.forms[-1].recompute_s)
        for layer, size in zip(workload.layers, kept, strict=True)
    )
    layers = LayerPlan(
        frozenset(range(len(workload.layers))), activations, rounds=rounds
    )
    if max(shares) > 1.001 * min(shares):
        raise PolicyError(f"{policy.text!r} needs chunks of one size")
    placed = place(workload, layers)
    state = Policy.make("zero-offload").plan_in_memory(placed, machine)
    operations = _MegatrainOperations(placed, layers)
    return replace(
        with_layer_operations(state, placed, layers, operations), policy=policy.text
    ).validate(placed)


class _MegatrainOperations(LayerOperations):
    """Weights come twice for a backward.

    Gradients of all micro-batches but the last are added to the gradients on the host.
    """

    def fetch_weights(self, stretch: Stretch) -> None:
        first = len(self.ops)
        super().fetch_weights(stretch)
        if not stretch.is_backward:
            return
        self.ops[first:] = [
            op._replace(nbytes=2 * op.nbytes) for op in self.ops[first:]
        ]
        if stretch.round < self._plan.rounds - 1:
            nbytes = (
                self._workload.grad_bytes * self._workload.layers[stretch.layer].params
            )
            self.add("layer gradient down", "d2h", stretch.layer, nbytes, stretch.end)


@system("roundpipe", without=("layers", "storage"))
def roundpipe(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Stream all weights and the inputs of layers, compute each layer again, and update
    on the CPU during the next iteration, as RoundPipe does on one GPU.

    A stage is one layer here. Iterations use parameters that are one step old."""
    _check(workload, policy)
    last = [len(layer.forms) - 1 for layer in workload.layers]
    layers = LayerPlan(
        frozenset(range(len(workload.layers))),
        saved_activations(workload, last, range(len(last))),
    )
    placed = place(workload, layers)
    builder = PlanBuilder(policy.text, placed)
    builder.gradients()
    for subgroup in range(len(builder.sizes)):
        update = builder.add("update", "cpu", subgroup, start=OTHER)
        builder.add("upload", "h2d", subgroup, placed.param_bytes, (update,), STEP)
    departures = Departures(
        frozenset({OWN_GRADIENT, CLIPPING_FIRST}),
        "updates take effect one iteration late",
    )
    state = replace(builder.plan(validate=False), departures=departures)
    return with_layer_operations(state, placed, layers).validate(placed)


@system(
    "zero3-offload-params",
    without=("layers", "storage"),
    activations=("keep", "recompute"),
)
def zero3_offload_params(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Stream all weights, and update on the CPU, as DeepSpeed's ZeRO-3 with
    `offload_param` and `offload_optimizer` does.

    One layer is fetched during another's compute: DeepSpeed fetches modules ahead, as
    many as `prefetch_bucket_size` holds."""
    _check(workload, policy)
    again = policy.options["activations"] == "recompute"
    forms = [len(layer.forms) - 1 if again else 0 for layer in workload.layers]
    layers = LayerPlan(
        frozenset(range(len(workload.layers))), saved_activations(workload, forms)
    )
    placed = place(workload, layers)
    state = replace(
        Policy.make("zero-offload").plan_in_memory(placed, machine), policy=policy.text
    )
    return with_layer_operations(state, placed, layers).validate(placed)


def _check(workload: Workload, policy: Policy) -> None:
    policy.reject_value()
    if not workload.layers:
        raise PolicyError(f"{policy.text!r} needs a workload with layers")
