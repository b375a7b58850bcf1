"""Weights of a model's layers that are in host memory, and on the device while the layer computes."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module

from ebbtide.interleave.engine.devices.device import Device, Direction
from ebbtide.interleave.engine.devices.opening import DeviceArgument, as_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.layers.measurement import PassMeasurement
from ebbtide.interleave.engine.layers.model_layers import LayerForward, MovedLayers, is_within_backward, other_hooks
from ebbtide.interleave.engine.layers.orders import ONE_AT_A_TIME, LayerOptions, LayerOrders
from ebbtide.interleave.engine.layers.saved_tensors import PackedTensor, is_plain
from ebbtide.interleave.engine.layers.transfers import SavedStorage, StorageTransfers, bytes_of
from ebbtide.interleave.policies.layer_choice import WEIGHTS

log = logging.getLogger("ebbtide")

# The number of nodes that autograd runs before all others that are ready, as the accumulation of a gradient.
_FIRST = 2**64 - 1
# Passes before there is a plan. The times of the first one do not count: it has not warmed up.
MEASURED_PASSES = 3


class _Weight:
    """A parameter on the host, and its storage on the device while that is there."""

    def __init__(self, name: str, param: torch.nn.Parameter, device: Device) -> None:
        self.name = name
        self.param = param
        # The last arrival of graphs whose backward has not ended, without its memory.
        self.last: torch.Tensor | None = None
        host = device.allocate_host(tuple(param.shape), param.dtype)
        host.copy_(param.detach())
        param.data = host
        # Of no layer whose activations move.
        self.storage = SavedStorage(host.untyped_storage(), (-1, 0))
        self.forget()

    def forget(self) -> None:
        """Release the device's copy, which the optimizer may be about to make an old one."""
        self.storage.host = bytes_of(self.param.detach().untyped_storage())
        self.storage.forget()
        self.version = self.param._version

    def is_of(self, params: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a layer has the parameter: the job may have replaced it, moved it or changed its dtype."""
        is_here = self.param.device.type == "cpu" and self.param.untyped_storage().nbytes() == self.storage.nbytes
        return is_here and params.get(self.name) is self.param

    def arrive(self, owner: "StreamedWeights") -> torch.Tensor:
        """Return the parameter on the device for a forward, whose gradient leaves at once.

        Gradients are added in the order of the plain job: to those of a later forward, and as reducers of several ranks
        get them."""
        is_again = is_within_backward()
        is_first = self.last is None or is_again or not self.param.requires_grad
        source = self.param if is_first else self.last
        tensor: torch.Tensor = _Arrival.apply(source, self, owner)
        if tensor.requires_grad and not is_again:
            # No view, which would hold the memory.
            self.last = torch.ops.aten._unsafe_view(tensor, tensor.shape)
            self.last.data = tensor.new_empty(0)
            for one in (tensor, self.last):
                one.grad_fn._set_sequence_nr(_FIRST)
        return tensor

    def on_device(self) -> torch.Tensor:
        storage = self.storage.hold()
        assert storage is not None
        empty = torch.empty(0, dtype=self.param.dtype, device=storage.device)
        return empty.set_(storage, self.param.storage_offset(), self.param.size(), self.param.stride())


class _Arrival(torch.autograd.Function):  # type: ignore[misc]
    """The parameter on the device; its gradient goes to the host as it comes, or to the arrival before."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: _Weight, owner: "StreamedWeights") -> torch.Tensor:
        ctx.owner, ctx.is_first = owner, source is weight.param
        return weight.on_device()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.owner.begin_backward()
        return _Departure.apply(gradient, ctx.owner.transfers) if ctx.is_first else gradient, None, None


class _Departure(torch.autograd.Function):  # type: ignore[misc]
    """A gradient on the host; its own gradient, of a second backward, goes to the device."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, transfers: StorageTransfers) -> torch.Tensor:
        ctx.transfers, ctx.device = transfers, gradient.device
        return _copied(transfers, "d2h", gradient, torch.device("cpu"))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(ctx.transfers, "h2d", gradient, ctx.device), None


def _copied(
    transfers: StorageTransfers, direction: Direction, source: torch.Tensor, device: torch.device
) -> torch.Tensor:
    target = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=device)
    transfers.copy_now(direction, source, target)
    return target


class _SavedWeight(NamedTuple):
    """A tensor in the device's copy of a weight, which comes again for the backward, and that weight."""

    tensor: PackedTensor
    weight: PackedTensor


class StreamedWeights(MovedLayers):
    """The weights of a model's layers on the host; `stream_weights` returns it.

    Attributes:
        kept: Names of parameters of layers that stay on the device: shared ones, and those that are no plain tensors.
    """

    what = "weights"
    choices_of = WEIGHTS

    def __init__(
        self, model: torch.nn.Module, memory_budget: float | str | None, device: Device | None, weights: str
    ) -> None:
        super().__init__(model, memory_budget, weights)
        self._model = model
        self._torch_device = next(self._layers[0].module.parameters(), torch.empty(0)).device
        self.transfers = self._open(device, self._torch_device)
        # By number: the layers that are streamed, and how many of these are before each.
        self._streamed: list[int] = []
        self._before: list[int] = [0]
        self._last_forward = -1
        self._is_end_awaited = False
        # Layers with weights on the device, or on the way there.
        self._there: set[LayerForward] = set()
        # Whether it makes its own plan, in place of activations that are moved around it.
        self._plans = True
        self.outer: MovedLayers | None = None
        self._passes = 0
        self._measurement: PassMeasurement | None = None
        self.kept: list[str] = []
        self._weights: dict[LayerForward, list[_Weight]] = {layer: [] for layer in self._layers}
        self.take_changed()
        if self.kept:
            log.info("ebbtide: weights that stay on the device: %s", ", ".join(self.kept))

    def take_changed(self) -> bool:
        """Move the weights of layers to the host, unless they are there. Return whether any were moved."""
        if all(map(self._is_current, self._layers)):
            return False
        modules = self._model.modules()
        uses = Counter(param for module in modules for param in module._parameters.values() if param is not None)
        self.kept.clear()
        for layer, weights in self._weights.items():
            params = dict(layer.module.named_parameters())
            own = {one.name: one for one in weights if one.is_of(params)}
            weights.clear()
            for name, param in params.items():
                if uses[param] > 1 or not is_plain(param.data) or not param.is_contiguous():
                    self.kept.append(f"{layer.name}.{name}")
                else:
                    weights.append(own.get(name) or _Weight(name, param, self.transfers.device))
        return True

    def _choice(self, layer: int) -> str:
        return "streamed" if self.orders.is_streamed(layer) else "resident"

    @property
    def storages(self) -> list[SavedStorage]:
        """The storages of all weights."""
        return [one.storage for one in chain.from_iterable(self._weights.values())]

    def sizes(self) -> list[tuple[int, int]]:
        """Return the bytes of the weights of each layer, in the order of the forward, and of their gradients."""
        layers = [
            [(one.storage.nbytes, one.param.requires_grad) for one in self._weights[layer]] for layer in self._order
        ]
        return [
            (sum(size for size, _ in layer), sum(size for size, is_trained in layer if is_trained)) for layer in layers
        ]

    def follow(self, orders: LayerOrders, measurement: PassMeasurement | None) -> None:
        """Take the orders of a pass that begins now from a plan that has activations, too."""
        self._plans = False
        self.orders, self._measurement = orders, measurement
        self._last_forward = len(self._order)
        self._number_streamed()

    def close(self) -> None:
        """Put the weights back on their device, and give the layers their own forwards back."""
        super().close()
        self._release(self._there)
        for weight in chain.from_iterable(self._weights.values()):
            weight.param.data = weight.param.data.to(self._torch_device)
        self._weights.clear()

    def run(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer's forward with its weights on the device."""
        weights, in_backward, has_grad = self._weights[layer], is_within_backward(), torch.is_grad_enabled()
        is_first, number = layer.number is None, self._number(layer)
        if is_first:
            self._number_streamed()
        if not in_backward:
            if number <= self._last_forward or not number:
                self._begin_pass(has_grad)
            self._last_forward = number
        marks = self._measurement if self._plans and not in_backward else None
        if marks is not None:
            marks.begin(False, number)
        self._fetch(layer, number, in_backward)
        if has_grad:
            params = {one.name: one.arrive(self) for one in weights}
        else:
            params = {one.name: one.on_device() for one in weights}
        hooks = _WeightHooks(self, layer, weights, other_hooks())
        with _reparametrize_module(layer.module, params), saved_tensors_hooks(hooks.save, hooks.load):
            output = layer.original(*args, **kwargs)
        if marks is not None:
            marks.end()
        if not (has_grad or in_backward):
            # No backward follows.
            self._release([layer])
        return output

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _begin_pass(self, has_grad: bool) -> None:
        # The optimizer may have stepped.
        self._release(self._there)
        self._is_end_awaited = False
        is_left = self._is_left_by(self.outer)
        if is_left:
            self.outer, self._plans = None, True
        if self.take_changed() or is_left:
            self._passes, self._measurement, self.orders = 0, None, ONE_AT_A_TIME
            self._number_streamed()
        if has_grad and DistributedDataParallel._active_ddp_module is not None and self._torch_device.type != "cpu":
            raise EngineError(
                "DistributedDataParallel reduces gradients on the device, which those of streamed weights leave: use "
                "fully_shard, or all_reduce the gradients of the model itself in a gloo group before each step"
            )
        if not (self._plans and has_grad):
            return
        measured, self._measurement = self._measurement, None
        if self._passes == MEASURED_PASSES and measured is not None:
            self._plan(measured, self.sizes(), LayerOptions("keep", self.option))
            self._number_streamed()
        elif self._passes < MEASURED_PASSES:
            self._measurement = PassMeasurement(self.transfers, measured)

    def _is_current(self, layer: LayerForward) -> bool:
        named, weights = dict(layer.module.named_parameters()), self._weights[layer]
        kept = (name for name in self.kept if name.startswith(f"{layer.name}."))
        return len(named) == len(weights) + sum(1 for _ in kept) and all(one.is_of(named) for one in weights)

    def _number_streamed(self) -> None:
        is_streamed = [self.orders.is_streamed(number) for number in range(len(self._order))]
        self._streamed = [number for number, streamed in enumerate(is_streamed) if streamed]
        self._before = [*accumulate(is_streamed, initial=0)]

    def begin_backward(self) -> None:
        """Release the weights when the backward that runs has ended."""
        if not self._is_end_awaited:
            self._is_end_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def load(self, saved: _SavedWeight, layer: LayerForward) -> torch.Tensor:
        """Return a weight for the backward. Raises EngineError if it was updated since the forward."""
        number = self._number(layer)
        if layer not in self._weights:
            raise EngineError(f"layer {layer.name}: stream_weights was closed between its forward and its backward")
        saved.weight.check(layer.name)
        self.begin_backward()
        if self._measurement is not None:
            self._measurement.begin(True, number)
        self._fetch(layer, number, True)
        return saved.tensor.get()

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _fetch(self, layer: LayerForward, number: int, is_backward: bool) -> None:
        """Bring the weights of a layer to the device, and issue the copies of those that are needed next.

        Streamed layers beyond the slots are released first. Resident ones are copied before a streamed one behind
        them, so that copies are issued in the order of need."""
        streamed, slots = self._streamed, self.orders.weight_slots
        if is_backward:
            position = self._before[number + 1]
            end = max(position, min(slots, len(streamed)))
            window = streamed[max(0, end - slots) : end]
            ahead = [one for one in reversed(window) if one < number]
        else:
            position = self._before[number]
            start = max(0, min(position, len(streamed) - slots))
            window = streamed[start : start + slots]
            behind = streamed[position + slots] if position + slots < len(streamed) else len(self._order)
            ahead = [*range(number + 1, behind)]
        passed = set(streamed) - {number, *window}
        self._release([one for one in self._there if one.number in passed])
        storages, where = self._storages(layer), f"layer {layer.name}"
        if not self.transfers.prefetch(storages):
            # One layer is to fit, whatever the slots are.
            self._release(self._there - {layer})
        self.transfers.bring_back(storages, where)
        self._there.add(layer)
        for one in ahead:
            if not self.transfers.prefetch(self._storages(self._order[one])):
                break
            self._there.add(self._order[one])

    def _storages(self, layer: LayerForward) -> list[SavedStorage]:
        """Return the storages of a layer's weights, without old values on the device."""
        weights = self._weights[layer]
        if any(weight.version != weight.param._version for weight in weights):
            self._release([layer])
        return [weight.storage for weight in weights]

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _release(self, layers: Collection[LayerForward]) -> None:
        """Release the weights of layers on the device."""
        for layer in [*layers]:
            self.transfers.wait_for("h2d", [weight.storage for weight in self._weights[layer]])
            for weight in self._weights[layer]:
                weight.forget()
            self._there.discard(layer)

    def _end_backward(self) -> None:
        for weight in chain.from_iterable(self._weights.values()):
            weight.last = None
        if self._measurement is not None:
            self._measurement.end()
        self._passes += 1
        self._is_end_awaited = False
        self._release(self._there)


class _WeightHooks:
    """Hooks of a layer's forward: weights are not saved, and all else as the hooks around it do."""

    def __init__(self, owner: StreamedWeights, layer: LayerForward, weights: Sequence[_Weight], outer: Any) -> None:
        self._owner = owner
        self._layer = layer
        self._outer = outer
        self._weights = {one.on_device().untyped_storage()._cdata: one for one in weights}

    def save(self, tensor: torch.Tensor) -> Any:
        weight = self._weights.get(tensor.untyped_storage()._cdata) if is_plain(tensor) else None
        if weight is not None:
            packed = PackedTensor(tensor, weight.storage, 0)
            return _SavedWeight(packed, PackedTensor(weight.param, weight.storage, 0))
        return PackedTensor(tensor, None, 0) if self._outer is None else self._outer[0](tensor)

    def load(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            return self._owner.load(saved, self._layer)
        if self._outer is None:
            saved.check(self._layer.name)
            return saved.get()
        return self._outer[1](saved)


def stream_weights(
    model: torch.nn.Module,
    *,
    memory_budget: float | str | None = None,
    device: DeviceArgument | None = None,
    weights: str = "auto",
) -> StreamedWeights:
    """Keep the weights of a model's layers in host memory, with the same bits as on the device.

    They come to the device before the layer's forward. Those of resident layers stay until the backward has ended;
    those of streamed ones are released, and come again before the layer's backward. Gradients go to the host as they
    come. Optimizers and state dicts see the parameters on the host. The first three iterations stream all layers; what
    they show makes the plan. The layers are those of `offload_activations`, which may be called after this: then one
    plan has both.

    Args:
        model: The model, on its device.
        memory_budget: Bytes of device memory that weights of layers may use: at least those of one layer. By default,
            what the device has free. Together with `offload_activations` the sum of both is for both.
        device: By default the device of the parameters; for parameters on the CPU an emulated one.
        weights: `auto`, or `resident` or `streamed` for all layers.

    Returns:
        An object that is in effect at once: until its `close`, or the end of its `with` block.

    Raises:
        EngineError: The model has no list of layers. Later: weights have changed between forward and backward, or the
            budget does not suffice for a layer (DeviceMemoryError).
    """
    return StreamedWeights(model, memory_budget, as_device(device), weights)
