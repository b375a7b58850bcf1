"""Block swap: frozen weights of some blocks are on the host, as trainers of adapters
(musubi-tuner, sd-scripts, diffusion-pipe, OneTrainer) have them."""

from collections.abc import Sequence
from dataclasses import replace

from ebbtide.errors import PolicyError
from ebbtide.features.layers.layer_choice import spread
from ebbtide.features.layers.layer_operations import (
    LayerOperations,
    with_layer_operations,
)
from ebbtide.features.layers.model import (
    SLOTS,
    LayerPlan,
    SavedActivation,
    Stretch,
    place,
    saved_activations,
)
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Policy, policy
from ebbtide.machines.machine import Machine

# The form of activations that a recorded job keeps where it computes them again.
_RECORDED = "as recorded"
_AUTO = "auto"


@policy(
    "block-swap",
    simulation_only=True,
    keeps_state=True,
    without=("layers", "storage"),
    down=("yes", "no"),
    memory=("pinned", "pageable"),
    activations=("recorded", "keep", "recompute"),
)
def block_swap(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep frozen weights of K layers on the host (without K: as few as fit),
    and all state on the device.

    With `down=yes` a layer that has been used is copied to the host, and one that is
    needed later into its memory, by one stream: the first layers make room for the last
    ones in the forward, and get it back in the backward. With `down=no` weights on the
    host stay there, and copies go through two buffers (`--block_swap_h2d_only`)."""
    count = len(workload.layers)
    is_frozen = [one.keeps_trained(workload.param_bytes) for one in workload.layers]
    if count <= SLOTS or not all(is_frozen):
        raise PolicyError(
            f"{policy.text!r} needs a workload of more than {SLOTS} layers whose "
            "weights are frozen"
        )
    activations = _activations(workload, policy)
    goes_down = policy.options["down"] == "yes"
    most = count - SLOTS if goes_down else count
    if policy.value in (None, _AUTO):
        swapped = _fewest(workload, activations, most, goes_down=goes_down)
    else:
        swapped = int(policy.number(f"K, or {_AUTO}", None, 0, most))
    layers = _layer_plan(swapped, activations, count, goes_down=goes_down)
    placed = place(workload, layers)
    kind = _Exchange if goes_down else LayerOperations
    state = Policy.make("gpu-only").plan_in_memory(placed, machine)
    plan = with_layer_operations(state, placed, layers, kind(placed, layers))
    if policy.options["memory"] == "pageable":
        plan = replace(plan, ops=tuple(op._replace(pageable=True) for op in plan.ops))
    remark = f"swaps {swapped} of {count} layers"
    return replace(plan, policy=policy.text, remark=remark).validate(placed)


def _activations(workload: Workload, policy: Policy) -> tuple[SavedActivation, ...]:
    """Return the activations that are kept, in the job's own form by default."""
    choice = policy.options["activations"]
    is_again = choice == "recompute"
    if choice == "recorded":
        is_again = workload.layers[0].forms[-1].name == _RECORDED
    forms = [(len(one.forms) - 1) * is_again for one in workload.layers]
    return saved_activations(workload, forms)


def _layer_plan(
    swapped: int,
    activations: tuple[SavedActivation, ...],
    count: int,
    *,
    goes_down: bool,
) -> LayerPlan:
    """Return the plan for layers of which some are not on the device at a time.

    Layers that make room for each other are a ring of slots."""
    if goes_down:
        ring = frozenset(range(count)) if swapped else frozenset[int]()
        return LayerPlan(ring, activations, count - swapped, swapped=swapped)
    chosen = enumerate(spread(swapped, count))
    streamed = frozenset(layer for layer, is_streamed in chosen if is_streamed)
    return LayerPlan(streamed, activations, SLOTS)


def _fewest(
    workload: Workload,
    activations: tuple[SavedActivation, ...],
    most: int,
    *,
    goes_down: bool,
) -> int:
    """Return the fewest layers with which the job fits; the most where none does."""
    state_bytes = workload.state_bytes * workload.params
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        layers = _layer_plan(
            middle, activations, len(workload.layers), goes_down=goes_down
        )
        placed = place(workload, layers)
        free = placed.min_free_bytes
        if placed.missing_bytes or (free is not None and free < state_bytes):
            low = middle + 1
        else:
            high = middle
    return low


class _Exchange(LayerOperations):
    """One stream copies each used layer down, and then the next one into its memory."""

    _before: Sequence[int] = ()

    def fetch_weights(self, stretch: Stretch) -> None:
        first = len(self.ops)
        super().fetch_weights(stretch)
        if len(self.ops) == first:
            return
        up = self.ops.pop()
        nbytes = self._weight_bytes[stretch.layer]
        down = self.add(
            "weights down",
            "d2h",
            stretch.layer,
            nbytes,
            stretch.end,
            after=self._before,
        )
        self.ops.append(up._replace(after=(down,)))
        self._before = (down + 1,)
