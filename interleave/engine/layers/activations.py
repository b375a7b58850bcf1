"""Activations of a model's layers, kept, recomputed or offloaded by a plan, in any training loop."""

import logging
import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import open_device
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.layers.layer_pass import LayerPass
from ebbtide.interleave.engine.layers.measurement import PassMeasurement
from ebbtide.interleave.engine.layers.memory import ActivationMemory, HostArena
from ebbtide.interleave.engine.layers.model_layers import (
    LayerForward,
    is_within_backward,
    other_hooks,
    replace_forwards,
    storages_of,
    tensors_in,
)
from ebbtide.interleave.engine.layers.orders import KEEP_ALL, ONE_AT_A_TIME, LayerOrders, plan_orders
from ebbtide.interleave.engine.layers.transfers import Transfers

log = logging.getLogger("ebbtide")

# Passes with inputs of a kind before there is a plan for them: the first one has not warmed up yet.
_MEASURED_PASSES = 2
# What passes with the same orders have in common: modes, types and dimensions of their inputs, and their sizes.
PassKey = tuple[Hashable, tuple[int, ...]]


class OffloadedActivations:
    """The activations of a model's layers under a plan; `offload_activations` returns it.

    As a context manager it ends with the block; else with `close`."""

    def __init__(self, model: torch.nn.Module, memory_budget: float | None, device: Device | None) -> None:
        if memory_budget is not None and not (isinstance(memory_budget, int | float) and memory_budget >= 0):
            raise EngineError(f"memory_budget is {memory_budget!r}: it must be bytes, at least 0, or None")
        self._model = model
        self._budget_bytes = memory_budget
        self._given_device = device
        self._torch_device = torch.device("cpu")
        self._kinds_of_pass: dict[PassKey, _KindOfPass] = {}
        self._kind: _KindOfPass | None = None
        self._pass: LayerPass | None = None
        self._names: list[str] = []
        self._is_closed = False
        self._is_idle = False
        self._layers = replace_forwards(model, self._run, "activations")

    @property
    def choices(self) -> dict[str, str]:
        """`keep`, `recompute` or `offload` by layer, in the order of the forward, of the last pass."""
        orders = ONE_AT_A_TIME if self._kind is None else self._kind.orders
        return dict(zip(self._names, orders.kinds(len(self._names)), strict=True))

    @property
    def orders(self) -> LayerOrders | None:
        """The orders of the last pass, and their plan; None before the first pass."""
        return None if self._kind is None else self._kind.orders

    @property
    def peak_bytes(self) -> int:
        """The most device memory that activations of layers have used, in bytes."""
        return self._transfers.memory.peak_bytes if self._is_open else 0

    @property
    def used_bytes(self) -> int:
        """The device memory that activations of layers use now, in bytes."""
        return self._transfers.memory.used_bytes if self._is_open else 0

    @property
    def host_bytes(self) -> int:
        """The host memory of offloaded activations, in bytes."""
        return self._transfers.arena.allocated_bytes if self._is_open else 0

    @property
    def _is_open(self) -> bool:
        return "_transfers" in vars(self)

    @cached_property
    def _transfers(self) -> Transfers:
        """The device, opened at the first pass: until then the model may move to it."""
        device = open_device(self._torch_device) if self._given_device is None else self._given_device
        return Transfers(device, ActivationMemory(device, self._budget_bytes), HostArena(device))

    def close(self) -> None:
        """Give the layers their own forwards back. Backwards of passes that have begun still work."""
        if not self._is_closed:
            self._is_closed = True
            for layer in self._layers:
                layer.remove()
            self._pass = None
            if self._is_open:
                self._transfers.arena.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer's forward as the orders say."""
        if not torch.is_grad_enabled():
            return layer.original(*args, **kwargs)
        if layer.number is None:
            layer.number = len(self._names)
            self._names.append(layer.name)
        if (
            is_within_backward()
            or other_hooks() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            # The job itself decides what is saved; transforms of torch.func do not allow hooks.
            return layer.original(*args, **kwargs)
        if not layer.number or self._pass is None or layer.number <= self._pass.last_layer:
            claim = self._begin_pass(layer, args, kwargs)
            if self._pass is None:
                output = layer.original(*args, **kwargs)
                if claim is not None:
                    claim.attach(tensors_in(output))
                return output
        return self._run_layer(self._pass, layer, layer.number, args, kwargs)

    def _begin_pass(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_KeptClaim | None":
        """Set the orders of a pass. Return the claim of the memory that it needs without orders."""
        tensors = tensors_in(args, kwargs)
        # Parameters may be streamed from the host.
        self._torch_device = next((one.device for one in tensors), self._torch_device)
        device_type = self._torch_device.type
        flags = (
            layer.module.training,
            torch.is_autocast_enabled(device_type),
            *((one.dtype, one.dim()) for one in tensors),
        )
        key = flags, tuple(size for one in tensors for size in one.shape)
        self._kind = kind = self._kinds_of_pass.get(key) or self._larger_kind(key)
        if kind is None:
            self._kind = kind = self._kinds_of_pass[key] = _KindOfPass()
            if self._budget() is None:
                kind.orders = KEEP_ALL
        if kind.orders is ONE_AT_A_TIME and kind.measured is not None:
            self._plan(kind)
        orders = kind.orders
        if orders.keeps_all:
            try:
                claim = _KeptClaim(self._transfers.memory, kind.saved_bytes) if kind.saved_bytes else None
                self._pass = None
                self._set_idle(True)
                return claim
            except DeviceMemoryError:
                # Another pass has its memory.
                orders = ONE_AT_A_TIME
        self._set_idle(False)
        measurement = PassMeasurement(self._transfers.device) if orders is ONE_AT_A_TIME else None
        own = storages_of(self._model)
        self._pass = LayerPass(self._transfers, orders, device_type, self._names, kind.end_pass, own, measurement)
        return None

    def _larger_kind(self, key: "PassKey") -> "_KindOfPass | None":
        """Return a kind of passes with orders whose inputs are larger in each dimension, the smallest one of them.

        Its memory suffices, and jobs whose lengths vary do not begin again with each of them."""
        flags, sizes = key
        larger = [
            (math.prod(others), number, kind)
            for number, ((other_flags, others), kind) in enumerate(self._kinds_of_pass.items())
            if kind.is_planned and other_flags == flags and all(map(operator.ge, others, sizes))
        ]
        return min(larger)[2] if larger else None

    def _set_idle(self, is_idle: bool) -> None:
        if self._is_idle != is_idle:
            self._is_idle = is_idle
            for layer in self._layers:
                layer.is_idle = is_idle and layer.number != 0

    def _run_layer(
        self, one: LayerPass, layer: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        one.begin_layer(number, storages_of(layer.module))
        with saved_tensors_hooks(one.save, one.load):
            if number in one.orders.recomputed:
                output = checkpoint(_Recomputed(one, layer, kwargs), *args, use_reentrant=False)
            elif one.measurement is not None:
                with one.measurement.inputs(number, layer.module, tensors_in(args, kwargs)):
                    output = layer.original(*args, **kwargs)
            else:
                output = layer.original(*args, **kwargs)
        one.end_layer(number, tensors_in(output))
        return output

    def _plan(self, kind: "_KindOfPass") -> None:
        assert kind.measured is not None
        rates = self._transfers.rates()
        self._transfers.measures = False
        layers, left_bytes = kind.measured.layers(self._names), kind.measured.left_bytes
        budget = self._budget()
        orders = plan_orders(layers, None if budget is None else max(0.0, budget - left_bytes), rates)
        kind.orders = orders if orders.plan is None else replace(orders, left=frozenset(kind.measured.left))
        kind.saved_bytes = sum(layer.saved_bytes for layer in layers) + left_bytes
        kind.measured = None
        log.info("ebbtide: activations of layers: %s", ", ".join(map(" ".join, self.choices.items())))

    def _budget(self) -> float | None:
        """Return the device memory that activations may use; None: no limit."""
        device, memory = self._transfers.device, self._transfers.memory
        free = device.free_bytes()
        if free is not None:
            # The job's own peak, which is not free, has these activations at their peak.
            free = max(0.0, free + memory.peak_bytes - device.used_bytes)
        limits = [limit for limit in (memory.limit_bytes, free) if limit is not None]
        return min(limits, default=None)


class _KindOfPass:
    """Passes with inputs of the same shapes and types, and the orders for them."""

    def __init__(self) -> None:
        self.orders = ONE_AT_A_TIME
        # Of all layers, while they are kept.
        self.saved_bytes = 0
        self.measured: PassMeasurement | None = None
        self._passes = 0

    @property
    def is_planned(self) -> bool:
        return self.orders is not ONE_AT_A_TIME

    def end_pass(self, one: LayerPass) -> None:
        """Take a pass whose backward has ended as a measurement."""
        if self.orders is ONE_AT_A_TIME and one.measurement is not None:
            self._passes += 1
            if self._passes == _MEASURED_PASSES:
                self.measured = one.measurement


class _KeptClaim:
    """The memory that all layers keep in a pass: claimed until the backward of the first one, or the end of its graph.

    Hooks of the first layer's saved tensors would know more, and would cost more than 1 % of a short step."""

    def __init__(self, memory: ActivationMemory, nbytes: int) -> None:
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


class _Recomputed:
    """The forward of a layer that is computed again in the backward, where what it saves is counted."""

    def __init__(self, one: LayerPass, layer: LayerForward, kwargs: dict[str, Any]) -> None:
        self._pass = one
        self._layer = layer
        self._kwargs = kwargs

    def __call__(self, *args: Any) -> Any:
        hooks = other_hooks()
        if hooks is None or not is_within_backward():
            return self._layer.original(*args, **self._kwargs)
        save, load = hooks

        def count(tensor: torch.Tensor) -> Any:
            self._pass.count(tensor)
            return save(tensor)

        with saved_tensors_hooks(count, load):
            return self._layer.original(*args, **self._kwargs)


def offload_activations(
    model: torch.nn.Module, *, memory_budget: float | None = None, device: Device | None = None
) -> OffloadedActivations:
    """Keep, recompute or offload the activations of each layer of a model, with the same bits as without.

    The layers are the entries of the list of modules (ModuleList, Sequential) with most parameters. The first passes
    offload the activations of each layer before the next one begins; what they show makes the plan. Where the memory
    suffices for all layers nothing is moved.

    Args:
        model: The model, on its device.
        memory_budget: Bytes of device memory that tensors saved by the layers for their backward may use. By default,
            what the device has free.
        device: By default the device of the parameters; for parameters on the CPU an emulated one.

    Returns:
        An object that is in effect at once: until its `close`, or the end of its `with` block.

    Raises:
        EngineError: The model has no list of layers, or an argument is not valid. Later, in the forward or the
            backward: a tensor was modified in place after it was saved, or the budget does not suffice for one layer
            (DeviceMemoryError).
    """
    return OffloadedActivations(model, memory_budget, device)
