"""Weights of a model's layers that are in host memory, and on the device while the layer computes."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module

from ebbtide.interleave.engine.devices.device import Device, copy_now
from ebbtide.interleave.engine.layers.model_layers import (
    LayerForward,
    MovedLayers,
    is_within_backward,
    other_hooks,
)
from ebbtide.interleave.engine.layers.saved_tensors import PackedTensor, is_plain
from ebbtide.interleave.engine.layers.transfers import SavedStorage, bytes_of

log = logging.getLogger("ebbtide")


class _Weight:
    """A parameter on the host, and its storage on the device while that is there."""

    def __init__(self, name: str, param: torch.nn.Parameter, device: Device) -> None:
        self.name = name
        self.param = param
        self.torch_device = param.device
        host = device.allocate_host(tuple(param.shape), param.dtype)
        host.copy_(param.detach())
        param.data = host
        self.storage = SavedStorage(host.untyped_storage(), (0, 0))
        self.forget()

    def forget(self) -> None:
        """Release the device's copy, which the optimizer may be about to make an old one."""
        self.storage.host = bytes_of(self.param.detach().untyped_storage())
        self.storage.forget()

    def on_device(self) -> torch.Tensor:
        storage = self.storage.hold()
        assert storage is not None
        empty = torch.empty(0, dtype=self.param.dtype, device=storage.device)
        return empty.set_(storage, self.param.storage_offset(), self.param.size(), self.param.stride())


class _Arrival(torch.autograd.Function):  # type: ignore[misc]
    """The parameter on the device; its gradient goes to the host as it comes."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, weight: _Weight, device: Device) -> torch.Tensor:
        ctx.device, ctx.weight = device, weight
        return weight.on_device()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        host = torch.empty_strided(gradient.size(), gradient.stride(), dtype=gradient.dtype, device="cpu")
        copy_now(ctx.device, "d2h", [(gradient, host)])
        return host, None, None


class _SavedWeight:
    """A tensor in the device's copy of a weight, which comes again for the backward."""

    def __init__(self, tensor: torch.Tensor, weight: _Weight, layer: LayerForward) -> None:
        self.tensor = PackedTensor(tensor, weight.storage, 0)
        self.version = PackedTensor(weight.param, weight.storage, 0)
        self.layer = layer


class StreamedWeights(MovedLayers):
    """The weights of a model's layers on the host; `stream_weights` returns it.

    Attributes:
        kept: Names of parameters of layers that stay on the device: shared ones, and those that are no plain tensors.
    """

    def __init__(self, model: torch.nn.Module, memory_budget: float | None, device: Device | None) -> None:
        super().__init__(model, self._run, "weights", memory_budget)
        first = next(self._layers[0].module.parameters(), torch.empty(0))
        self._moves = self._open(device, first.device, "weights of layers")
        self._moves.measures = False
        self._order: list[LayerForward] = []
        self._backward_of: LayerForward | None = None
        uses = Counter(
            param for module in model.modules() for param in module._parameters.values() if param is not None
        )
        self.kept: list[str] = []
        self._weights: dict[LayerForward, list[_Weight]] = {}
        for layer in self._layers:
            self._weights[layer] = []
            for name, param in layer.module.named_parameters():
                if uses[param] > 1 or not is_plain(param.data) or not param.is_contiguous():
                    self.kept.append(f"{layer.name}.{name}")
                else:
                    self._weights[layer].append(_Weight(name, param, self._moves.device))
        if self.kept:
            log.info("ebbtide: weights that stay on the device: %s", ", ".join(self.kept))

    def close(self) -> None:
        """Put the weights back on their device, and give the layers their own forwards back."""
        super().close()
        for weight in chain.from_iterable(self._weights.values()):
            weight.param.data = weight.param.data.to(weight.torch_device)
        self._weights.clear()

    def _run(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer's forward with its weights on the device."""
        weights, in_backward = self._weights[layer], is_within_backward()
        if layer.number is None:
            layer.number = len(self._order)
            self._order.append(layer)
        if not in_backward and layer.number == 0:
            # The optimizer may have stepped.
            self._release_others(None)
        self._fetch(layer, layer.number + 1 if not in_backward else layer.number - 1)
        if torch.is_grad_enabled():
            params = {one.name: _Arrival.apply(one.param, one, self._moves.device) for one in weights}
        else:
            params = {one.name: one.on_device() for one in weights}
        hooks = _WeightHooks(self, layer, weights, other_hooks())
        try:
            with _reparametrize_module(layer.module, params), saved_tensors_hooks(hooks.save, hooks.load):
                return layer.original(*args, **kwargs)
        finally:
            if not in_backward:
                for weight in weights:
                    weight.forget()

    def load(self, saved: _SavedWeight) -> torch.Tensor:
        """Return a weight for the backward. Raises EngineError if it was updated since the forward."""
        saved.version.check(saved.layer.name)
        if self._backward_of is not saved.layer:
            if self._backward_of is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._backward_of = saved.layer
            self._release_others(saved.layer)
        self._fetch(saved.layer, (saved.layer.number or 0) - 1)
        return saved.tensor.get()

    def _fetch(self, layer: LayerForward, ahead: int) -> None:
        """Bring the weights of a layer to the device, and issue the copies of the one that is needed next."""
        self._moves.bring_back([weight.storage for weight in self._weights[layer]], f"layer {layer.name}")
        if 0 <= ahead < len(self._order):
            self._moves.prefetch([weight.storage for weight in self._weights[self._order[ahead]]])

    def _release_others(self, layer: LayerForward | None) -> None:
        """Release the weights of all layers but one and the one before it, which comes next in the backward."""
        before = self._order[layer.number - 1] if layer is not None and layer.number else None
        for other, weights in self._weights.items():
            if other is not layer and other is not before:
                self._moves.wait_for("h2d", [weight.storage for weight in weights])
                for weight in weights:
                    weight.forget()

    def _end_backward(self) -> None:
        self._backward_of = None
        self._release_others(None)


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
            return _SavedWeight(tensor, weight, self._layer)
        return PackedTensor(tensor, None, 0) if self._outer is None else self._outer[0](tensor)

    def load(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            return self._owner.load(saved)
        if self._outer is None:
            saved.check(self._layer.name)
            return saved.get()
        return self._outer[1](saved)


def stream_weights(
    model: torch.nn.Module, *, memory_budget: float | None = None, device: Device | None = None
) -> StreamedWeights:
    """Keep the weights of a model's layers in host memory, with the same bits as on the device.

    They come to the device before the layer's forward and before its backward, those of the next layer while it
    computes, and are released after it. Gradients go to the host as they come. Optimizers and state dicts see the
    parameters on the host. The layers are those of `offload_activations`, which may be called after this.

    Args:
        model: The model, on its device.
        memory_budget: Bytes of device memory that streamed weights may use: at least those of one layer. By default,
            what the device has.
        device: By default the device of the parameters; for parameters on the CPU an emulated one.

    Returns:
        An object that is in effect at once: until its `close`, or the end of its `with` block.

    Raises:
        EngineError: The model has no list of layers. Later: weights have changed between forward and backward, or the
            budget does not suffice for a layer (DeviceMemoryError).
    """
    return StreamedWeights(model, memory_budget, device)
