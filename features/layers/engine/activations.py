"""Activations of a model's layers, kept, recomputed or offloaded by a plan, in any training loop."""

import math
import operator
import weakref
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.features.layers.engine.layer_pass import LayerPass
from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.memory import LayerMemoryCount
from ebbtide.features.layers.engine.model_layers import (
    LayerForward,
    MovedLayers,
    is_within_backward,
    other_hooks,
    storages_of,
    tensors_in,
)
from ebbtide.features.layers.engine.orders import KEEP_ALL, ONE_AT_A_TIME, LayerOptions
from ebbtide.features.layers.engine.recomputation import Recomputation, RecomputedLayers
from ebbtide.features.layers.engine.weights import MEASURED_PASSES, StreamedWeights
from ebbtide.features.layers.layer_choice import ACTIVATIONS
from ebbtide.interleave.engine.devices.opening import DeviceArgument, as_device, is_same_device
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError

# Without a limit of memory nothing moves.
_NOTHING_TO_CHOOSE = {
    LayerOptions(activations, weights) for activations in ("auto", "keep") for weights in (None, "auto", "resident")
}
_MAY_RECOMPUTE = ("auto", "recompute", "recompute-offload")
# What passes with the same orders have in common: modes, types and dimensions of their inputs, and their sizes.
PassKey = tuple[Hashable, tuple[int, ...]]


class OffloadedActivations(MovedLayers):
    """The activations of a model's layers under a plan; `offload_activations` returns it."""

    what = "activations"
    choices_of = ACTIVATIONS

    def __init__(
        self,
        model: torch.nn.Module,
        memory_budget: float | str | None,
        device: DeviceArgument | None,
        activations: str,
        on_difference: str,
    ) -> None:
        given_device = as_device(device)
        super().__init__(model, memory_budget, activations)
        inner = self._layers[0].original
        self._weights: StreamedWeights | None = None
        if isinstance(inner, LayerForward) and isinstance(inner.owner, StreamedWeights):
            self._weights = inner.owner
            self._join(inner.owner, device)
        self._model = model
        self._recomputed = RecomputedLayers(on_difference)
        self._kind: _KindOfPass | None = None
        self._given_device = given_device
        self._torch_device = torch.device("cpu")
        self._kinds_of_pass: dict[PassKey, _KindOfPass] = {}
        self._pass: LayerPass | None = None
        # Those that something saved belongs to.
        self._passes: weakref.WeakSet[LayerPass] = weakref.WeakSet()

    def _join(self, weights: StreamedWeights, device: DeviceArgument | None) -> None:
        """Share the memory, the copies and the plan of streamed weights."""
        if device is not None and not is_same_device(device, weights.transfers.device):
            raise EngineError("give stream_weights and offload_activations the same device")
        self._transfers, weights.outer = weights.transfers, self
        self._transfers.memory.budgets[self.what] = self._budget_bytes

    def _choice(self, layer: int) -> str:
        return self.orders.kind(layer)

    def run(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer's forward as the orders say."""
        if not torch.is_grad_enabled():
            return layer.original(*args, **kwargs)
        number = self._number(layer)
        if (
            is_within_backward()
            or other_hooks() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            # The job itself decides what is saved; transforms of torch.func do not allow hooks.
            return layer.original(*args, **kwargs)
        if not number or self._pass is None or number <= self._pass.last_layer:
            claim = self._begin_pass(layer, args, kwargs)
            if self._pass is None:
                output = layer.original(*args, **kwargs)
                if claim is not None:
                    claim.attach(tensors_in(output))
                return output
        return self._run_layer(self._pass, layer, number, args, kwargs)

    def _begin_pass(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_KeptClaim | None":
        """Set the orders of a pass. Return the claim of the memory that it needs without orders."""
        tensors = tensors_in(args, kwargs)
        # Parameters may be streamed from the host, and some inputs stay there.
        devices = [one.device for one in tensors]
        gpus = (device for device in devices if device.type != "cpu")
        self._torch_device = next(chain(gpus, devices), self._torch_device)
        # The device is opened at the first pass: until then the model may move to it.
        transfers = self._transfers or self._open(self._given_device, self._torch_device)
        if self._is_left_by(self._weights):
            self._weights = None
            self._kinds_of_pass.clear()
        if self._weights is not None and self._weights.take_changed():
            self._kinds_of_pass.clear()
        device_type = self._torch_device.type
        flags = (
            layer.module.training,
            torch.is_autocast_enabled(device_type),
            *((one.dtype, one.dim()) for one in tensors),
        )
        key = flags, tuple(size for one in tensors for size in one.shape)
        kind = self._kinds_of_pass.get(key) or self._larger_kind(key)
        if kind is None:
            kind = self._kinds_of_pass[key] = _KindOfPass()
            if self._limit_bytes() is None and self._options() in _NOTHING_TO_CHOOSE:
                kind.orders = KEEP_ALL
        self._kind = kind
        if kind.measured is not None:
            marks, refused = self._recomputed.tried, self._recomputed.refused()
            kind.measured.comparisons = {
                number: marks[layer]
                for number, layer in enumerate(self._order)
                if layer in marks and number not in refused
            }
            sizes = [] if self._weights is None else self._weights.sizes()
            self._plan(kind.measured, sizes, self._options())
            kind.orders = self.orders
            kind.saved_bytes = sum(kind.measured.saved_bytes.values()) + kind.measured.left_bytes
            kind.measured = None
        kind.orders = kind.orders.without_recomputation(self._recomputed.refused())
        orders, claim = kind.orders, None
        if orders.keeps_all and kind.saved_bytes:
            try:
                claim = _KeptClaim(transfers.memory, kind.saved_bytes)
            except DeviceMemoryError:
                # Another pass has its memory.
                orders = ONE_AT_A_TIME
        self.orders = orders
        for one in self._layers:
            one.is_idle = orders.keeps_all and one.number != 0
        measurement = PassMeasurement(transfers, kind.before) if orders is ONE_AT_A_TIME else None
        if self._weights is not None:
            self._weights.follow(orders, measurement)
        self._pass = None
        if orders.keeps_all:
            # It waits for no copy later: one of a pass that has no backward would hold its memory.
            transfers.wait("d2h", lambda _: True)
        else:
            own = storages_of(self._model)
            is_trial = kind.before is not None and self.option in _MAY_RECOMPUTE
            self._pass = LayerPass(
                transfers,
                orders,
                self._order,
                kind.end_pass,
                own,
                measurement,
                is_trial=is_trial and measurement is not None,
            )
            self._passes.add(self._pass)
            transfers.evict = self._evict
        return claim

    def _evict(self) -> bool:
        if any(one.evict(one is self._pass) for one in self._passes):
            return True
        return self._weights is not None and self._weights.evict()

    def _options(self) -> LayerOptions:
        return LayerOptions(self.option, None if self._weights is None else self._weights.option)

    def _larger_kind(self, key: "PassKey") -> "_KindOfPass | None":
        """Return a kind of passes with orders whose inputs are larger in each dimension, the smallest one of them.

        Its memory suffices, and jobs whose lengths vary do not begin again with each of them."""
        flags, sizes = key
        larger = [
            (math.prod(others), number, kind)
            for number, ((other_flags, others), kind) in enumerate(self._kinds_of_pass.items())
            if kind.orders is not ONE_AT_A_TIME and other_flags == flags and all(map(operator.ge, others, sizes))
        ]
        return min(larger)[2] if larger else None

    def _run_layer(
        self, one: LayerPass, layer: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_trial = one.measurement is not None and self._tries(layer)
        one.begin_layer(number, storages_of(layer.module))
        if one.measurement is not None:
            one.measurement.take_inputs(number, tensors_in(args, kwargs))
        if is_trial or number in one.orders.recomputed:
            output = Recomputation(self._recomputed, one, layer, number, is_trial).run(args, kwargs)
        else:
            with saved_tensors_hooks(one.save, one.load):
                output = layer.original(*args, **kwargs)
        one.end_layer(number, tensors_in(output))
        return output

    def _tries(self, layer: LayerForward) -> bool:
        """Return whether a layer is computed again in this measured pass, which shows whether it can be.

        The first pass may fill caches."""
        rules = self._recomputed
        is_first = self._kind is None or self._kind.before is None
        return not is_first and self.option in _MAY_RECOMPUTE and layer not in (rules.tried | rules.reasons)

    @property
    def not_recomputed(self) -> dict[str, str]:
        """By layer that is never computed again: the reason."""
        return {layer.name: reason for layer, reason in self._recomputed.reasons.items()}


class _KindOfPass:
    """Passes with inputs of the same shapes and types, and the orders for them."""

    def __init__(self) -> None:
        self.orders = ONE_AT_A_TIME
        # Of all layers, while they are kept.
        self.saved_bytes = 0
        self.measured: PassMeasurement | None = None
        self.before: PassMeasurement | None = None
        self._passes = 0

    def end_pass(self, one: LayerPass) -> None:
        """Take a pass whose backward has ended as a measurement."""
        if self.orders is ONE_AT_A_TIME and one.measurement is not None:
            self._passes += 1
            self.before = one.measurement
            if self._passes == MEASURED_PASSES:
                self.measured = one.measurement


class _KeptClaim:
    """The memory that all layers keep in a pass: claimed until the backward of the first one, or the end of its graph.

    Hooks of the first layer's saved tensors would know more, and would cost more than 1 % of a short step."""

    def __init__(self, memory: LayerMemoryCount, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = 0
        memory.claim(nbytes)
        self._nbytes = nbytes

    def release(self, *_: Any) -> None:
        self._memory.unclaim(self._nbytes)
        self._nbytes = 0

    def __del__(self) -> None:
        self.release()

    def attach(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the graph of a layer's outputs hold this."""
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(self.release)
                return


def offload_activations(
    model: torch.nn.Module,
    *,
    memory_budget: float | str | None = None,
    device: DeviceArgument | None = None,
    activations: str = "auto",
    on_difference: str = "error",
) -> OffloadedActivations:
    """Keep, recompute or offload the activations of each layer of a model, with the same bits as without.

    The layers are the entries of the list of modules (ModuleList, Sequential) with most parameters. The first passes
    offload the activations of each layer before the next one begins; what they show makes the plan. Where the memory
    suffices for all layers nothing is moved.

    Args:
        model: The model, on its device.
        memory_budget: Bytes of device memory that tensors saved by the layers for their backward may use. By default,
            what the device has free. After `stream_weights` the sum of both is for activations and weights.
        device: By default the device of the parameters; for parameters on the CPU an emulated one.
        activations: `auto`, or `keep`, `recompute`, `offload` or `recompute-offload` (inputs go to the host,
            and the rest is computed again) for all layers.
        on_difference: What to do in the backward if computing a layer again gives other values than its forward: raise
            an `error`, or `warn` and go on with them, as `torch.utils.checkpoint` does. It is not recomputed again.

    Returns:
        An object that is in effect at once: until its `close`, or the end of its `with` block.

    Raises:
        EngineError: The model has no list of layers, or an argument is not valid. Later, in the forward or the
            backward: a tensor was modified in place after it was saved, computing a layer again gives other values, or
            the budget does not suffice for one layer (DeviceMemoryError).
    """
    return OffloadedActivations(model, memory_budget, device, activations, on_difference)
