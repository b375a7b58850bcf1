"""One pass over the layers of a model.

Their weights and activations move by one plan in one budget.
"""

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter, ge
from typing import Any, Self

import torch

from ebbtide.features.layers.engine.activations import Activations, KeptClaim
from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.memory import HostArena, LayerMemoryCount
from ebbtide.features.layers.engine.model_layers import (
    NOT_RUN,
    LayerForward,
    forward_of,
    is_within_backward,
    layer_modules,
    other_hooks,
    tensors_in,
)
from ebbtide.features.layers.engine.orders import (
    KEEP_ALL,
    ONE_AT_A_TIME,
    LayerOptions,
    LayerOrders,
    plan_orders,
)
from ebbtide.features.layers.engine.transfers import SavedStorage, StorageTransfers
from ebbtide.features.layers.engine.weights import StreamedWeights
from ebbtide.features.layers.layer_choice import LAYER_OPTIONS, streamed_count
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import (
    DeviceArgument,
    as_device,
    is_same_device,
    open_device,
)
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.options import budget_bytes, check_budget_bytes
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies.registry import is_choice

log = logging.getLogger("ebbtide")

# Passes before there is a plan. The times of the first one do not count: it has not
# warmed up.
MEASURED_PASSES = 3
# Without a limit of memory nothing moves.
_NOTHING_TO_CHOOSE = {
    LayerOptions(activations, weights)
    for activations in ("auto", "keep")
    for weights in (None, "auto", "resident")
}
# What passes with the same orders have in common: modes, types and dimensions of their
# inputs, and their sizes.
PassKey = tuple[Hashable, tuple[int, ...]]


class _KindOfPass:
    """Passes with inputs of the same shapes and types, and the orders for them."""

    def __init__(self) -> None:
        self.orders = ONE_AT_A_TIME
        # Of all layers, while they are kept.
        self.saved_bytes = 0
        self.measured: PassMeasurement | None = None
        self.before: PassMeasurement | None = None
        self._passes = 0

    def end_pass(self, measurement: PassMeasurement | None) -> None:
        """Take a pass whose backward has ended as a measurement."""
        if self.orders is ONE_AT_A_TIME and measurement is not None:
            self._passes += 1
            self.before = measurement
            if self._passes == MEASURED_PASSES:
                self.measured = measurement


class LayerMover:
    """Runs the layers of a model, and moves what the open calls of `move_layers` say.

    Attributes:
        device: None before it is opened.
        order: Layers that have run, in the order of the forward.
        weights: Moves weights; None: they stay where they are.
        activations: Moves activations; None: they are kept, and not counted.
        orders: The orders of the last pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: dict[str, torch.nn.Module],
        device: Device | None,
    ) -> None:
        self._model = model
        self.device = device
        self.layers = [
            LayerForward(name, module, self) for name, module in modules.items()
        ]
        self.order: list[LayerForward] = []
        self.transfers: StorageTransfers | None = None
        self.weights: StreamedWeights | None = None
        self.activations: Activations | None = None
        self.orders: LayerOrders = ONE_AT_A_TIME
        self._calls: list[MovedLayers] = []
        self._options = LayerOptions("keep")
        self._limit_bytes: float | None = None
        self._kinds_of_pass: dict[PassKey, _KindOfPass] = {}
        # The number of the layer that has begun last, and whether its pass has orders.
        self._last_layer = -1
        self._has_orders = False
        self._measurement: PassMeasurement | None = None

    def open_call(self, call: "MovedLayers") -> None:
        """Move what a call says, too."""
        self._calls.append(call)
        try:
            self._update()
            if self.transfers is not None:
                self.transfers.memory.limit_bytes = self._limit_bytes
        except BaseException:
            self.close_call(call)
            raise

    def close_call(self, call: "MovedLayers") -> None:
        """Move what the other calls say."""
        if call in self._calls:
            self._calls.remove(call)
            self._update()

    def _update(self) -> None:
        """Take the last open call for weights, and the last one for activations."""
        deciding: dict[str, MovedLayers] = {}
        for call in self._calls:
            deciding |= dict.fromkeys(call.options, call)
        options = {name: call.options[name] for name, call in deciding.items()}
        self._options = LayerOptions(
            options.get("activations", "keep"), options.get("weights")
        )
        budgets = [
            call.budget_bytes
            for call in {*deciding.values()}
            if call.budget_bytes is not None
        ]
        self._limit_bytes = sum(budgets) if budgets else None
        self._kinds_of_pass.clear()
        self._last_layer = len(self.layers)
        for layer in self.layers:
            layer.is_idle = not deciding
        if self._calls:
            self._set_activations(deciding.get("activations"))
            self._set_weights(options.get("weights"))
        else:
            self._close()

    def _set_activations(self, call: "MovedLayers | None") -> None:
        if call is None:
            self.activations = None
            return
        before, options = (
            self.activations,
            (call.options["activations"], call.on_difference),
        )
        if before is None or (before.option, before.on_difference) != options:
            self.activations = Activations(self._model, *options)

    def _set_weights(self, option: str | None) -> None:
        if option is not None:
            if self.weights is None:
                self.weights = StreamedWeights(
                    self._model, self.layers, self.order, self._open
                )
            self.weights.choose(option)
        elif self.weights is not None:
            self.weights.close()
            self.weights = None

    def _close(self) -> None:
        """Give the layers their own weights and forwards back."""
        if self.weights is not None:
            self.weights.close()
        for layer in self.layers:
            layer.remove()
        if self.transfers is not None:
            self.transfers.arena.release()

    def _open(self, torch_device: torch.device) -> StorageTransfers:
        """Open the device, once. Until then the model may move to it."""
        if self.transfers is None:
            device = open_device(torch_device) if self.device is None else self.device
            memory = LayerMemoryCount(device, self._limit_bytes)
            self.transfers = StorageTransfers(device, memory, HostArena(device))
            self.transfers.evict = self._evict
            self.device = device
        return self.transfers

    def _evict(self) -> bool:
        if self.activations is not None and self.activations.evict():
            return True
        return self.weights is not None and self.weights.evict()

    def run(
        self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a layer's forward as the orders say."""
        if layer.number == NOT_RUN:
            layer.number = len(self.order)
            self.order.append(layer)
        number = layer.number
        if is_within_backward():
            return self.compute(layer, args, kwargs)
        if number <= self._last_layer or not number:
            self._has_orders = False
            if self.weights is not None and self.weights.begin_pass():
                self._kinds_of_pass.clear()
        self._last_layer = number
        if not torch.is_grad_enabled() or self._is_saved_otherwise():
            return self.compute(layer, args, kwargs)
        claim = (
            None
            if self._has_orders
            else self._set_orders(layer, tensors_in(args, kwargs))
        )
        if self.activations is not None:
            output = self.activations.run(layer, number, args, kwargs)
        elif self._measurement is not None:
            self._measurement.begin(False, number)
            output = self.compute(layer, args, kwargs)
            self._measurement.end()
        else:
            output = self.compute(layer, args, kwargs)
        if claim is not None:
            claim.attach(tensors_in(output))
        return output

    def _is_saved_otherwise(self) -> bool:
        """Return whether the job itself decides what is saved.

        Transforms of torch.func do not allow hooks.
        """
        has_hooks = (
            other_hooks() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        )
        return self.activations is not None and has_hooks

    def compute(
        self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a layer's own forward with its weights on the device."""
        if self.weights is not None and self.weights.moves(layer):
            return self.weights.run(layer, args, kwargs)
        return layer.original(*args, **kwargs)

    def _set_orders(
        self, layer: LayerForward, inputs: Sequence[torch.Tensor]
    ) -> KeptClaim | None:
        """Set the orders of a pass. Return the claim of the memory that it needs
        without orders."""
        self._has_orders = True
        # Parameters may be streamed from the host, and some inputs stay there.
        gpus = (one.device for one in inputs if one.device.type != "cpu")
        transfers = self._open(next(gpus, torch.device("cpu")))
        if not self._kinds_of_pass:
            # The limit of the calls that are open. Before, the backward of a pass may
            # have needed the limit of closed ones.
            transfers.memory.limit_bytes = self._limit_bytes
        kind = self._kind_of_pass(layer, inputs)
        if kind.measured is not None:
            self._plan(kind, kind.measured)
        if self.activations is not None:
            kind.orders = kind.orders.without_recomputation(self.activations.refused())
        orders, claim = kind.orders, None
        if orders.keeps_all and kind.saved_bytes:
            try:
                claim = KeptClaim(transfers.memory, kind.saved_bytes)
            except DeviceMemoryError:
                # Another pass has its memory.
                orders = ONE_AT_A_TIME
        self.orders = orders
        measurement = (
            PassMeasurement(transfers, kind.before) if orders is ONE_AT_A_TIME else None
        )
        self._measurement = measurement
        for one in self.layers:
            one.is_idle = (
                orders.keeps_all and one.number != 0 and not self._moves_weights(one)
            )
        if self.weights is not None:
            self.weights.follow(
                orders, measurement, None if self.activations else kind.end_pass
            )
        if self.activations is not None:
            is_first = kind.before is None
            self.activations.begin_pass(
                transfers, orders, self.order, kind.end_pass, measurement, is_first
            )
        return claim

    def _moves_weights(self, layer: LayerForward) -> bool:
        return self.weights is not None and self.weights.moves(layer)

    def _kind_of_pass(
        self, layer: LayerForward, inputs: Sequence[torch.Tensor]
    ) -> _KindOfPass:
        """Return the kind of the pass that begins with the inputs of a layer. Weights
        alone do not depend on them."""
        assert self.transfers is not None
        flags: Hashable = None
        sizes: tuple[int, ...] = ()
        if self.activations is not None:
            is_autocast = torch.is_autocast_enabled(
                self.transfers.device.torch_device.type
            )
            flags = (
                layer.module.training,
                is_autocast,
                *((one.dtype, one.dim()) for one in inputs),
            )
            sizes = tuple(size for one in inputs for size in one.shape)
        key = flags, sizes
        kind = self._kinds_of_pass.get(key) or self._larger_kind(key)
        if kind is None:
            kind = self._kinds_of_pass[key] = _KindOfPass()
            if self._usable_bytes() is None and self._options in _NOTHING_TO_CHOOSE:
                kind.orders = KEEP_ALL
        return kind

    def _larger_kind(self, key: PassKey) -> _KindOfPass | None:
        """Return the smallest kind of passes with orders whose inputs are larger in
        each dimension.

        Its memory suffices, and jobs whose lengths vary do not begin again with each of
        them.
        """
        flags, sizes = key
        larger = [
            (math.prod(others), number, kind)
            for number, ((other_flags, others), kind) in enumerate(
                self._kinds_of_pass.items()
            )
            if kind.orders is not ONE_AT_A_TIME
            and other_flags == flags
            and all(map(ge, others, sizes))
        ]
        return min(larger)[2] if larger else None

    def _plan(self, kind: _KindOfPass, measured: PassMeasurement) -> None:
        """Give a kind of passes the orders of the best plan for what was measured."""
        assert self.transfers is not None
        if self.activations is not None:
            measured.comparisons = self.activations.comparisons()
        sizes = [] if self.weights is None else self.weights.sizes()
        layers = measured.layers([layer.name for layer in self.order], sizes)
        budget, rates = self._usable_bytes(), self.transfers.rates()
        self.transfers.measures = False
        budget = None if budget is None else max(0.0, budget - measured.left_bytes)
        orders = plan_orders(layers, budget, rates, self._options, measured.outside())
        self.orders = (
            orders
            if orders.plan is None
            else replace(orders, left=frozenset(measured.left))
        )
        kind.orders, kind.measured = self.orders, None
        kind.saved_bytes = sum(measured.saved_bytes.values()) + measured.left_bytes
        log.info(
            "ebbtide: layers: %s",
            ", ".join(
                f"{name} {' '.join(both)}" for name, both in self.choices().items()
            ),
        )

    def _usable_bytes(self) -> float | None:
        """Return the device memory that may be used; None: no limit."""
        assert self.transfers is not None
        device, memory = self.transfers.device, self.transfers.memory
        free = device.free_bytes()
        if free is not None:
            # The job's own peak, which is not free, has this memory at its peak.
            free = max(0.0, free + memory.peak_bytes - device.used_bytes)
        return min(
            (limit for limit in (memory.limit_bytes, free) if limit is not None),
            default=None,
        )

    def choices(self) -> dict[str, tuple[str, str]]:
        """Return what the orders of the last pass say of each layer's weights and
        activations, in order."""
        choices = {}
        # While all is kept, layers do not count themselves.
        for layer in sorted(self.layers, key=attrgetter("number")):
            number = layer.number
            is_streamed = (
                self.weights is not None
                and layer in self.weights.moved
                and self.orders.is_streamed(number)
            )
            activations = (
                "keep" if self.activations is None else self.orders.kind(number)
            )
            choices[layer.name] = "streamed" if is_streamed else "resident", activations
        return choices


class MovedLayers:
    """Weights and activations of a model's layers that move until `close` or the end of
    a `with` block.

    Attributes:
        options: The choices of the call by what it moves: `weights` and `activations`.
        budget_bytes: Its memory budget; None: what the device has free.
        on_difference: As of `move_layers`.
    """

    # What `choices` has; None: both.
    _shown: str | None = None

    def __init__(
        self,
        mover: LayerMover,
        options: dict[str, str],
        budget_bytes: float | None,
        on_difference: str,
    ) -> None:
        self._mover = mover
        self.options = options
        self.budget_bytes = budget_bytes
        self.on_difference = on_difference
        mover.open_call(self)

    @property
    def weights(self) -> dict[str, str]:
        """The choice for weights by layer: `resident` or `streamed`.

        Layers are in the order of the forward, of the last pass.
        """
        return {name: weights for name, (weights, _) in self._mover.choices().items()}

    @property
    def activations(self) -> dict[str, str]:
        """The choice for activations by layer: `keep`, `recompute`, `offload` or
        `recompute-offload`.

        Layers are in the order of the forward, of the last pass."""
        return {
            name: activations
            for name, (_, activations) in self._mover.choices().items()
        }

    @property
    def choices(self) -> dict[str, str]:
        """By layer: both choices, as `streamed, recompute`.

        `offload_activations` has the activations alone, `stream_weights` the weights
        alone.
        """
        if self._shown is None:
            return {
                name: ", ".join(both) for name, both in self._mover.choices().items()
            }
        return self.weights if self._shown == "weights" else self.activations

    @property
    def kept(self) -> list[str]:
        """Names of streamed layers' parameters and buffers that stay on the device.

        They are shared parameters, adapters of frozen layers, parameters that are no
        plain tensors, and quantized weights in buffers."""
        return [] if self._mover.weights is None else self._mover.weights.kept

    @property
    def weight_storages(self) -> list[SavedStorage]:
        """The storages of weights that move."""
        return [] if self._mover.weights is None else self._mover.weights.storages

    @property
    def not_recomputed(self) -> dict[str, str]:
        """By layer that is never computed again: the reason."""
        reasons = (
            {} if self._mover.activations is None else self._mover.activations.reasons
        )
        return {layer.name: reason for layer, reason in reasons.items()}

    @property
    def plan(self) -> Plan | None:
        """The plan of the last pass; None for the first passes, and where nothing
        limits the memory."""
        return self._mover.orders.plan

    @property
    def predicted(self) -> Schedule | None:
        """The simulated iteration of the plan, from one pass to the next, one forward
        and backward."""
        return self._mover.orders.predicted

    @property
    def peak_bytes(self) -> int:
        """The most device memory that weights and activations have used, in bytes."""
        return (
            0
            if self._mover.transfers is None
            else self._mover.transfers.memory.peak_bytes
        )

    @property
    def used_bytes(self) -> int:
        """The device memory that they use now, in bytes."""
        return (
            0
            if self._mover.transfers is None
            else self._mover.transfers.memory.used_bytes
        )

    @property
    def host_bytes(self) -> int:
        """The host memory of activations that were offloaded, in bytes."""
        return (
            0
            if self._mover.transfers is None
            else self._mover.transfers.arena.allocated_bytes
        )

    def close(self) -> None:
        """Move what other open calls for the model say, and nothing without one.

        Backwards of passes that have begun still work, except backwards of layers whose
        weights were streamed."""
        self._mover.close_call(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mover_of(model: torch.nn.Module, device: DeviceArgument | None) -> LayerMover:
    """Return what runs the layers of a model, which is made where there is none. Raises
    EngineError."""
    modules, given = layer_modules(model), as_device(device)
    forwards = [
        one for module in modules.values() if (one := forward_of(module)) is not None
    ]
    if not forwards:
        return LayerMover(model, modules, given)
    mover = forwards[0].owner
    assert isinstance(mover, LayerMover)
    if [layer.module for layer in mover.layers] != [*modules.values()]:
        raise EngineError(
            f"layer {forwards[0].name} moves already, with other layers: give all "
            "calls the same model"
        )
    if mover.device is None:
        mover.device = given
    elif device is not None and not is_same_device(device, mover.device):
        raise EngineError(
            "these layers move to another device already: give all calls for a model "
            "the same device"
        )
    return mover


def move_layers(
    model: torch.nn.Module,
    *,
    weights: str = "auto",
    activations: str = "auto",
    memory_budget: float | str | None = None,
    device: DeviceArgument | None = None,
    on_difference: str = "error",
) -> MovedLayers:
    """Move weights and activations of a model's layers between device and host, with
    the same bits as without.

    The layers are the entries of the list of modules (ModuleList, Sequential) with most
    parameters. Streamed weights are on the host, where optimizers and state dicts see
    them, and come to the device before the layer's forward and before its backward;
    their gradients go to the host as they come. The first three iterations move one
    layer at a time; what they show makes the plan. A further call for the model widens
    what moves: the last one that moves weights or activations says how, and the budgets
    of both are one.

    Args:
        model: The model, on its device.
        weights: `resident` (they do not move), `streamed`, `streamed:K` (of K layers,
            evenly spread; the others do not move), or `auto` (as many as the budget
            needs; the weights of the others are on the device from their forward to
            their backward).
        activations: `keep`, `recompute`, `offload`, `recompute-offload` (inputs go to
            the host, and the rest is computed again) for all layers, or `auto`.
        memory_budget: Device memory in bytes, or text like "4GiB", for what moves:
            weights, and what layers save for their backward. It is a hard limit. By
            default, what the device has free.
        device: By default the device of the parameters; for parameters on the CPU an
            emulated one.
        on_difference: What to do in the backward if computing a layer again gives other
            values than its forward: raise an `error`, or `warn` and go on with them, as
            `torch.utils.checkpoint` does. It is not recomputed again.

    Returns:
        An object that is in effect at once: until its `close`, or the end of its `with`
            block.

    Raises:
        EngineError: The model has no list of layers, or an argument is not valid.
            Later, in the forward or the backward: a tensor or a weight has changed
            since it was saved, computing a layer again gives other values, or the
            budget does not suffice for one layer (DeviceMemoryError).
    """
    options = {"weights": weights, "activations": activations}
    for name, option in options.items():
        if not is_choice(option, LAYER_OPTIONS[name]):
            raise EngineError(
                f"{name}={option!r}: choose from {', '.join(LAYER_OPTIONS[name])}"
            )
    layers = len(layer_modules(model))
    if (streamed_count(weights) or 0) > layers:
        raise EngineError(
            f"weights={weights!r}: {type(model).__name__} has {layers} layers"
        )
    # The first choices do not move anything.
    moved = {
        name: option
        for name, option in options.items()
        if option != LAYER_OPTIONS[name][0]
    }
    budget = budget_bytes(memory_budget)
    if memory_budget is not None:
        check_budget_bytes(budget, "None")
    return MovedLayers(mover_of(model, device), moved, budget, on_difference)


def offload_activations(
    model: torch.nn.Module,
    *,
    memory_budget: float | str | None = None,
    device: DeviceArgument | None = None,
    activations: str = "auto",
    on_difference: str = "error",
) -> MovedLayers:
    """Keep, recompute or offload the activations of each layer: `move_layers` with
    resident weights."""
    moved = move_layers(
        model,
        weights="resident",
        activations=activations,
        memory_budget=memory_budget,
        device=device,
        on_difference=on_difference,
    )
    moved._shown = "activations"
    return moved


def stream_weights(
    model: torch.nn.Module,
    *,
    memory_budget: float | str | None = None,
    device: DeviceArgument | None = None,
    weights: str = "auto",
) -> MovedLayers:
    """Stream the weights of layers from the host: `move_layers` with activations that
    are kept, and not counted."""
    moved = move_layers(
        model,
        weights=weights,
        activations="keep",
        memory_budget=memory_budget,
        device=device,
    )
    moved._shown = "weights"
    return moved
