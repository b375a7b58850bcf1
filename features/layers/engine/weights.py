"""Weights of a model's layers in host memory, which are on the device while the layer
computes."""

import gc
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.memory import HostArena
from ebbtide.features.layers.engine.model_layers import (
    LayerForward,
    is_within_backward,
    other_hooks,
    tensors_in,
)
from ebbtide.features.layers.engine.orders import ONE_AT_A_TIME, LayerOrders
from ebbtide.features.layers.engine.saved_tensors import (
    PackedTensor,
    TensorVersion,
    is_plain,
)
from ebbtide.features.layers.engine.transfers import (
    Flight,
    SavedStorage,
    StorageTransfers,
    bytes_of,
)
from ebbtide.features.layers.layer_choice import spread, streamed_count
from ebbtide.interleave.engine.errors import EngineError

log = logging.getLogger("ebbtide")

# The number of nodes that autograd runs before all others that are ready, as the
# accumulation of a gradient.
_FIRST = 2**64 - 1

# Types of buffers that are weights.
_QUANTIZED = (torch.uint8, torch.int8, torch.int32)


class _DeviceWeight(torch.Tensor):  # type: ignore[misc]
    """A parameter on the device as its layer sees it. Writes through `data` have no
    version, so taking it is noted."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    # An instance of Parameter, as the layer's code and torch's compiler expect.
    _is_param = True
    is_data_taken = False

    @property
    def data(self) -> torch.Tensor:
        self.is_data_taken = True
        return _data(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.is_data_taken = True
        _set_data(self, values)


_data, _set_data = torch.Tensor.data.__get__, torch.Tensor.data.__set__


class _Copy(NamedTuple):
    """A copy of a weight on the device after a forward, which the layer may have kept.

    Attributes:
        storage: A reference to it.
        param_version: The version of the parameter that it has the values of.
        version: The version of the layer's tensor in it.
    """

    storage: Callable[[], torch.UntypedStorage | None]
    param_version: int
    version: TensorVersion


class _Weight:
    """A parameter on the host, and its storage on the device while that is there."""

    def __init__(
        self,
        layer: LayerForward,
        name: str,
        param: torch.nn.Parameter,
        owner: "StreamedWeights",
    ) -> None:
        self.layer = layer
        self.name = name
        self.param = param
        self._owner = owner
        # The last arrival of graphs whose backward has not ended, without its memory.
        self.last: torch.Tensor | None = None
        # What the layer sees where autocast's cache is to keep its cast, and its values
        # while they are not there.
        self._leaf: _DeviceWeight | None = None
        self._absent = torch.empty(0)
        # Numbers of references to it that are ours; the node that accumulates its
        # gradient has one, and is held.
        self._own_references = 0, 0
        self._accumulation: Any = None
        # Of the forwards of this pass, and those before that the layer has kept.
        self.copies: list[_Copy] = []
        host = owner.transfers.device.allocate_host(tuple(param.shape), param.dtype)
        host.copy_(param.detach())
        # Of no layer whose activations move.
        self.storage = SavedStorage(host.untyped_storage(), (-1, 0))
        param.data = host
        self.forget()

    def forget(self) -> None:
        """Release the device's copy.

        The optimizer may be about to make it an old one.
        """
        self.storage.host = bytes_of(self.param.detach().untyped_storage())
        self.storage.forget()
        self._empty_leaf()
        self.version = self.param._version

    def _empty_leaf(self) -> None:
        """Release the values of what the layer sees, unless the job has it."""
        if self._leaf is not None and self._references() == self._own_references:
            _set_data(self._leaf, self._absent)

    def _references(self) -> tuple[int, int]:
        """Return how many references there are in Python and in C++ to what the layer
        sees."""
        return sys.getrefcount(self._leaf), getattr(self._leaf, "_use_count", int)()

    def check_copies(self) -> None:
        """Raise EngineError if the layer has kept an outdated copy.

        The values of the copy are no longer the parameter's.
        """
        if not self._has_old_copy():
            return
        # Cycles of references may hold one.
        gc.collect()
        self._empty_leaf()
        if self._has_old_copy():
            raise EngineError(
                f"layer {self.layer.name}: {self.name} has changed, and a tensor that "
                "shares its memory on the device "
                "was kept since before and has old values: read the parameter again in "
                "each forward, or delete the "
                "tensor before the next one"
            )

    def _has_old_copy(self) -> bool:
        version = self.param._version
        return any(
            one.param_version != version and one.storage() is not None
            for one in self.copies
        )

    @property
    def is_old(self) -> bool:
        """Whether the parameter was written since its copy to the device.

        Also whether it has other memory.
        """
        host = self.storage.host
        return (
            host is None
            or self.version != self.param._version
            or host.data_ptr() != _start_of(self.param)
        )

    def is_of(self, params: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a layer has the parameter.

        The job may have replaced it, moved it or changed its dtype.
        """
        is_here = (
            self.param.device.type == "cpu"
            and self.param.untyped_storage().nbytes() == self.storage.nbytes
        )
        return is_here and params.get(self.name) is self.param

    def arrive(self, has_grad: bool) -> _DeviceWeight:
        """Return the parameter on the device for a forward.

        Gradients are added in the order of the plain job: to the gradients of a later
        forward, and as reducers of several ranks get them."""
        tensor: _DeviceWeight = self.on_device()
        if not self.param.requires_grad:
            return tensor
        if self.param.dtype == torch.float32 and _caches_casts(tensor.device.type):
            return self._as_leaf(tensor)
        if not has_grad:
            return tensor
        is_again = is_within_backward()
        if self.last is None or is_again:
            landing = _Landing(self._owner.transfers)
            source = _Landed.apply(self.param, landing)
            source.grad_fn._set_sequence_nr(_FIRST)
            tensor = _Arrival.apply(source, tensor, self._owner, landing)
        else:
            tensor = _Arrival.apply(self.last, tensor, self._owner, None)
        if not is_again:
            self.last = _Former.apply(tensor)
            self.last.data = _data(tensor).new_empty(0)
            for one in (tensor, self.last):
                one.grad_fn._set_sequence_nr(_FIRST)
        return tensor

    def _as_leaf(self, tensor: _DeviceWeight) -> _DeviceWeight:
        """Return the values as the leaf that stands for the parameter.

        Autocast keeps casts of leaves alone.
        """
        if self._leaf is None:
            # Of the same shape, so that a gradient fits.
            self._absent = tensor.new_full((), float("nan")).expand(tensor.shape)
            self._leaf = torch.Tensor._make_subclass(_DeviceWeight, tensor, True)
            self._leaf.register_post_accumulate_grad_hook(self._take_gradient)
            with torch.enable_grad():
                view = self._leaf.view_as(self._leaf)
            self._accumulation = view.grad_fn.next_functions[0][0]
            del view
            self._own_references = self._references()
        leaf: _DeviceWeight = self._leaf
        _set_data(leaf, tensor)
        return leaf

    def _take_gradient(self, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        self._owner.deliver(self, gradient)

    # In inference mode, too, versions tell of writes.
    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def on_device(self) -> _DeviceWeight:
        storage = self.storage.hold()
        assert storage is not None
        param = self.param
        tensor = torch.empty(0, dtype=param.dtype, device=storage.device)
        tensor.set_(storage, param.storage_offset(), param.size(), param.stride())
        device_weight: _DeviceWeight = torch.Tensor._make_subclass(
            _DeviceWeight, tensor
        )
        return device_weight


def _adapters_in(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the adapters of a frozen layer: its trained parameters, if they are fewer
    bytes than the frozen ones."""
    trained = {param for param in module.parameters() if param.requires_grad}
    trained_bytes = sum(param.nbytes for param in trained)
    return (
        trained
        if 2 * trained_bytes < sum(param.nbytes for param in module.parameters())
        else set()
    )


def _quantized_buffers(module: torch.nn.Module) -> list[str]:
    """Return the names of buffers that are matrices of integers.

    Weights of GPTQ and AWQ are such.
    """
    return [
        name
        for name, buffer in module.named_buffers()
        if buffer.dim() == 2 and buffer.dtype in _QUANTIZED
    ]


def _nothing() -> None:
    """Stand in for a reference to an object that is gone."""


def _start_of(param: torch.Tensor) -> int:
    address: int = param.untyped_storage().data_ptr()
    return address


def _caches_casts(device_type: str) -> bool:
    return bool(
        torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled()
    )


class _Use:
    """A weight in one forward of its layer.

    Attributes:
        written: The version of the tensor up to which its writes are in the parameter.
        param: The parameter with the version that a backward needs.
    """

    def __init__(self, weight: _Weight, tensor: _DeviceWeight) -> None:
        self.weight = weight
        self.tensor = tensor
        self.written = tensor._version
        self.param = PackedTensor(weight.param, weight.storage, 0)
        module, _, self._name = weight.name.rpartition(".")
        self._module = weight.layer.module.get_submodule(module)
        tensor.is_data_taken = False

    def show(self) -> None:
        self._module._parameters[self._name] = self.tensor

    def hide(self) -> None:
        """Give the module its parameter back, unless the job has replaced it."""
        if self._module._parameters.get(self._name) is self.tensor:
            self._module._parameters[self._name] = self.weight.param
        if isinstance(self._module, torch.nn.RNNBase):
            # It has a list of them.
            self._module._init_flat_weights()


class _Landing:
    """A gradient on its way to the host.

    Attributes:
        flight: Its copy.
        gradient: The gradient, where autograd does not bring it.
    """

    def __init__(self, transfers: StorageTransfers) -> None:
        self.transfers = transfers
        self.flight: Flight | None = None
        self.gradient: torch.Tensor | None = None


class _Landed(torch.autograd.Function):  # type: ignore[misc]
    """The parameter itself; its gradient has arrived before anything reads it.

    On a GPU this waits in the thread that accumulates gradients on the host, not in the
    thread of the backward."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, landing: _Landing) -> torch.Tensor:
        ctx.landing = landing
        ctx.set_materialize_grads(False)
        return param.detach()

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        landing = ctx.landing
        if landing.flight is not None:
            landing.transfers.synchronize(landing.flight)
        delivered, landing.flight, landing.gradient = landing.gradient, None, None
        return gradient if delivered is None else delivered, None


class _Arrival(torch.autograd.Function):  # type: ignore[misc]
    """The parameter on the device.

    Its gradient goes to the host as it comes, or to the arrival before.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        tensor: torch.Tensor,
        owner: "StreamedWeights",
        landing: _Landing | None,
    ) -> torch.Tensor:
        ctx.owner, ctx.landing = owner, landing
        ctx.set_materialize_grads(False)
        # Not the argument, which would count as a view.
        return torch.Tensor._make_subclass(_DeviceWeight, tensor)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        ctx.owner.begin_backward()
        if ctx.landing is not None and gradient is not None:
            gradient = _Departure.apply(gradient, ctx.owner, ctx.landing)
        return gradient, None, None, None


class _Former(torch.autograd.Function):  # type: ignore[misc]
    """An arrival for the next one, whose gradient it takes. It is no view, which would
    hold the memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


class _Departure(torch.autograd.Function):  # type: ignore[misc]
    """A gradient on the host, whose copy is issued.

    Its own gradient, of a second backward, goes to the device.
    """

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, owner: "StreamedWeights", landing: _Landing
    ) -> torch.Tensor:
        ctx.transfers, ctx.device = owner.transfers, gradient.device
        host, landing.flight = owner.send(gradient)
        return host

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        source = gradient.contiguous()
        target = torch.empty_like(source, device=ctx.device)
        ctx.transfers.copy_now("h2d", source, target)
        return target, None, None


class _SavedWeight(NamedTuple):
    """A tensor in the device's copy of a weight, and the forward that saved it.

    The copy comes again for the backward.
    """

    tensor: PackedTensor
    use: _Use


class _Departed(NamedTuple):
    """A gradient of a layer whose copy was issued.

    With a weight, its parameter gets the gradient from here.
    """

    layer: int
    flight: Flight
    weight: _Weight | None = None
    landing: _Landing | None = None


class StreamedWeights:
    """The weights of some layers of a model on the host.

    Attributes:
        moved: Layers with some weights that move.
        kept: Names of parameters and buffers of chosen layers that stay on the device:
            shared parameters, adapters of frozen layers, those that are no plain
            tensors, and quantized weights in buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[LayerForward],
        order: Sequence[LayerForward],
        open_device: Callable[[torch.device], StorageTransfers],
    ) -> None:
        self._model = model
        self._layers = layers
        self._order = order
        self.orders = ONE_AT_A_TIME
        self._check_devices()
        # A model that the device does not hold begins on the host.
        self._origin = next(self._layers[0].module.parameters(), torch.empty(0)).device
        self.transfers = open_device(self._origin)
        self._torch_device = self.transfers.device.torch_device
        # By number: the layers that are streamed, and how many of these are before
        # each.
        self._streamed: list[int] = []
        self._before: list[int] = [0]
        self._last_moved = -1
        self._is_end_awaited = False
        # The layer whose backward runs.
        self._backward_of = -1
        # Numbers of layers whose outputs need a backward.
        self._differentiated: set[int] = set()
        # The layer whose weights were needed last.
        self._fetched: LayerForward | None = None
        # Layers with weights on the device, or on the way there.
        self._there: set[LayerForward] = set()
        # Forwards whose writes are not in the parameters yet.
        self._uses: dict[LayerForward, list[_Use]] = {}
        # Pinned memory of gradients, as long as the job has them, and those on the way
        # there.
        self._gradients = HostArena(self.transfers.device, slack=1)
        self._departed: list[_Departed] = []
        # A wait for copies keeps the thread of a GPU's backward from issuing work.
        self.delivers_later = self._torch_device.type != "cpu"
        self._measurement: PassMeasurement | None = None
        self._end: Callable[[PassMeasurement | None], None] | None = None
        self.moved: set[LayerForward] = set()
        self.kept: list[str] = []
        # Layers that are to move, and the weights of those that do.
        self._chosen: Collection[LayerForward] = ()
        self._weights: dict[LayerForward, list[_Weight]] = {
            layer: [] for layer in layers
        }

    def choose(self, option: str) -> None:
        """Stream the weights of as many layers as an option says.

        Bring other streamed weights back.
        """
        count = streamed_count(option)
        is_chosen = spread(
            len(self._layers) if count is None else count, len(self._layers)
        )
        self._chosen = {
            layer
            for layer, chosen in zip(self._layers, is_chosen, strict=True)
            if chosen
        }
        self.orders = ONE_AT_A_TIME
        for layer in self._layers:
            if layer not in self._chosen:
                self._restore(layer)
        self.take_changed()
        self.moved = {layer for layer, weights in self._weights.items() if weights}
        self._number_streamed()

    def moves(self, layer: LayerForward) -> bool:
        """Return whether weights of a layer move."""
        return bool(self._weights[layer])

    def _check_devices(self) -> None:
        """Raise EngineError if layers have parameters on several devices."""
        params = chain.from_iterable(
            layer.module.parameters() for layer in self._layers
        )
        devices = {str(param.device) for param in params}
        if len(devices) > 1:
            raise EngineError(
                "weights of layers stream to one device, and they are on "
                f"{', '.join(sorted(devices))}: load the model "
                "without device_map, or with one device"
            )

    def take_changed(self) -> bool:
        """Move the chosen layers' weights to the host, unless they are there. Return
        whether any were moved."""
        if all(map(self._is_current, self._chosen)):
            return False
        modules = self._model.modules()
        uses = Counter(
            param
            for module in modules
            for param in module._parameters.values()
            if param is not None
        )
        scripted = [
            module
            for module in self._model.modules()
            if not isinstance(module._parameters, dict)
        ]
        # Scripted code has places of its own for its parameters.
        stays = {param for module in scripted for param in module.parameters()}
        stays |= {param for param, count in uses.items() if count > 1}
        self.kept.clear()
        for layer in self._layers:
            if layer in self._chosen:
                self._take_layer(layer, stays)
        if self.kept:
            log.info(
                "ebbtide: weights that stay on the device: %s", ", ".join(self.kept)
            )
        return True

    def _take_layer(
        self, layer: LayerForward, stays: Collection[torch.nn.Parameter]
    ) -> None:
        """Move the weights of a layer to the host.

        Some weights, its adapters, and what is no plain tensor stay.
        """
        params, weights = dict(layer.module.named_parameters()), self._weights[layer]
        own = {one.name: one for one in weights if one.is_of(params)}
        weights.clear()
        self.kept += [
            f"{layer.name}.{name}" for name in _quantized_buffers(layer.module)
        ]
        adapters = _adapters_in(layer.module)
        for name, param in params.items():
            # A late parameter has its own class again after this.
            is_plain_param = (
                is_plain(param.data)
                and type(param) is torch.nn.Parameter
                and param.is_contiguous()
            )
            if param in stays or param in adapters or not is_plain_param:
                self.kept.append(f"{layer.name}.{name}")
                if param.device != self._torch_device:
                    # It was moved before, or made beside a weight on the host.
                    param.data = param.data.to(self._torch_device)
            else:
                weights.append(own.get(name) or _Weight(layer, name, param, self))

    @property
    def storages(self) -> list[SavedStorage]:
        """The storages of all weights."""
        return [one.storage for one in chain.from_iterable(self._weights.values())]

    def sizes(self) -> list[tuple[int, int]]:
        """Return the bytes of the weights of each layer, and of their gradients, in the
        order of the forward."""
        sizes = []
        for layer in self._order:
            trained = (
                one.storage.nbytes
                for one in self._weights[layer]
                if one.param.requires_grad
            )
            sizes.append(
                (sum(one.storage.nbytes for one in self._weights[layer]), sum(trained))
            )
        return sizes

    def follow(
        self,
        orders: LayerOrders,
        measurement: PassMeasurement | None,
        end: Callable[[PassMeasurement | None], None] | None,
    ) -> None:
        """Take the orders of a pass that begins now.

        `end` is called when its backward has ended.
        """
        self.orders, self._measurement, self._end = orders, measurement, end
        self._number_streamed()

    def close(self) -> None:
        """Put the weights back where they were.

        Release the host memory of gradients.
        """
        for layer in self._layers:
            self._restore(layer)
        self._gradients.release()

    def _restore(self, layer: LayerForward) -> None:
        self._release([layer])
        for weight in self._weights[layer]:
            weight.param.data = weight.param.data.to(self._origin)
        self._weights[layer] = []

    def run(
        self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a layer's forward with its weights on the device."""
        weights, in_backward, has_grad = (
            self._weights[layer],
            is_within_backward(),
            torch.is_grad_enabled(),
        )
        number = layer.number
        if number >= len(self._before) - 1:
            self._number_streamed()
        self._fetch(layer, number, in_backward)
        uses = [_Use(one, one.arrive(has_grad)) for one in weights]
        hooks = _WeightHooks(self, layer, uses, other_hooks())
        self._uses[layer] = uses
        has_ended = False
        try:
            for use in uses:
                use.show()
            with saved_tensors_hooks(hooks.save, hooks.load):
                output = layer.original(*args, **kwargs)
            has_ended = True
        finally:
            self._take_writes(layer, has_ended)
        if not in_backward:
            self._expect_backward(
                layer, has_grad and any(one.requires_grad for one in tensors_in(output))
            )
        if number == self._last_moved and not in_backward:
            # The job may write the parameters next.
            self.transfers.finish("h2d")
        return output

    def _expect_backward(self, layer: LayerForward, is_differentiated: bool) -> None:
        """Note whether a backward follows a layer's forward.

        Frozen layers before all others have none.
        """
        if is_differentiated:
            self._differentiated.add(layer.number)
            return
        if torch.is_grad_enabled():
            # An evaluation says nothing of the backward of a forward before.
            self._differentiated.discard(layer.number)
        self._release([layer])

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def begin_pass(self) -> bool:
        """Release what a pass before has left. Return whether weights of layers have
        changed and were moved."""
        # After an error or an interrupt.
        for layer in [*self._uses]:
            self._take_writes(layer)
        for departed in self._departed:
            self.transfers.land(departed.flight)
        self._departed.clear()
        self._check_writes()
        # The optimizer may have stepped.
        self._release(self._there)
        self._is_end_awaited = False
        has_changed = self.take_changed()
        if has_changed:
            self.orders = ONE_AT_A_TIME
            self._number_streamed()
        is_replica = (
            torch.is_grad_enabled()
            and DistributedDataParallel._active_ddp_module is not None
        )
        if is_replica and self._torch_device.type != "cpu":
            raise EngineError(
                "DistributedDataParallel reduces gradients on the device, which those "
                "of streamed weights leave: use "
                "fully_shard, or all_reduce the gradients of the model itself in a "
                "gloo group before each step"
            )
        return has_changed

    def _is_current(self, layer: LayerForward) -> bool:
        named, weights = dict(layer.module.named_parameters()), self._weights[layer]
        kept = [name for name in self.kept if name.startswith(f"{layer.name}.")]
        count = len(named) + len(_quantized_buffers(layer.module))
        return count == len(weights) + len(kept) and all(
            one.is_of(named) for one in weights
        )

    def _number_streamed(self) -> None:
        is_moved = [self.moves(layer) for layer in self._order]
        is_streamed = [
            moved and self.orders.is_streamed(number)
            for number, moved in enumerate(is_moved)
        ]
        self._last_moved = max(
            (number for number, moved in enumerate(is_moved) if moved), default=-1
        )
        self._streamed = [
            number for number, streamed in enumerate(is_streamed) if streamed
        ]
        self._before = [*accumulate(is_streamed, initial=0)]

    def begin_backward(self) -> None:
        """Release the weights when the backward that runs has ended."""
        if not self._is_end_awaited:
            self._is_end_awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def send(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Flight]:
        """Issue the copy of a gradient to the host. Return it there, without its values
        yet, and the copy."""
        if gradient.is_sparse:
            indices, _ = self.send(gradient._indices())
            values, flight = self.send(gradient._values())
            host = torch.sparse_coo_tensor(
                indices,
                values,
                gradient.shape,
                check_invariants=False,
                is_coalesced=gradient.is_coalesced(),
            )
            return host, flight
        source = gradient.detach().resolve_conj().resolve_neg().contiguous()
        host, block = self._gradients.lend(source)
        # Autograd takes a gradient as it is if nothing else refers to the same tensor.
        pair = source.view(-1).view(torch.uint8), bytes_of(host.untyped_storage())
        flight = self.transfers.issue("d2h", [pair], [block])
        self._departed.append(_Departed(self._backward_of, flight))
        return host, flight

    def deliver(self, weight: _Weight, gradient: torch.Tensor) -> None:
        """Bring the gradient of a leaf to the parameter, when its copy has ended.
        Autograd has no path between them."""
        if gradient.requires_grad:
            raise EngineError(
                f"layer {weight.layer.name}: a backward with create_graph=True under "
                "autocast needs "
                "torch.autocast(..., cache_enabled=False) around a model with streamed "
                "weights"
            )
        self.begin_backward()
        landing = _Landing(self.transfers)
        landing.gradient, landing.flight = self.send(gradient)
        self._departed[-1] = _Departed(
            self._backward_of, landing.flight, weight, landing
        )
        if not self.delivers_later:
            self._land(lambda _: True)

    def _land(self, is_passed: Callable[[int], bool]) -> None:
        """Let the job wait for gradients of selected layers.

        A function selects them. Their memory is then used again.
        """
        for departed in [one for one in self._departed if is_passed(one.layer)]:
            self._departed = [one for one in self._departed if one is not departed]
            if departed.weight is not None:
                with torch.enable_grad():
                    root = _Landed.apply(departed.weight.param, departed.landing)
                # The values come from the copy.
                torch.autograd.backward(root, root.new_zeros(()).expand_as(root))
            self.transfers.land(departed.flight)

    def load(self, saved: _SavedWeight, layer: LayerForward) -> torch.Tensor:
        """Return a weight for the backward. Raises EngineError if it was updated since
        the forward."""
        number = layer.number
        if saved.use.weight not in self._weights[layer]:
            raise EngineError(
                f"layer {layer.name}: its weights were closed or moved anew between "
                "its forward and its backward"
            )
        saved.tensor.check(layer.name)
        saved.use.param.check(layer.name)
        if layer in self._uses:
            # A backward within the layer's forward.
            return saved.tensor.get()
        self.begin_backward()
        if self._measurement is not None:
            self._measurement.begin(True, number)
        self._backward_of = number
        # A link that is slower than the backward would let gradients fill the device.
        self._land(lambda layer: layer not in (number, number + 1))
        self._fetch(layer, number, True)
        tensor, storage = saved.tensor.get(), saved.tensor.storage
        assert storage is not None
        self.transfers.use(storage, tensor)
        return tensor

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _fetch(self, layer: LayerForward, number: int, is_backward: bool) -> None:
        """Bring the weights of a layer to the device.

        Issue the copies of the weights that are needed next.

        Streamed layers beyond the slots are released first. Resident ones are copied
        before a streamed one behind them, so that copies are issued in the order of
        need."""
        self._fetched = layer
        streamed, slots = self._streamed, self.orders.weight_slots
        if is_backward:
            position = self._before[number + 1]
            end = max(position, min(slots, len(streamed)))
            window = streamed[max(0, end - slots) : end]
            ahead = [
                one
                for one in reversed(window)
                if one < number and one in self._differentiated
            ]
        else:
            position = self._before[number]
            start = max(0, min(position, len(streamed) - slots))
            window = streamed[start : start + slots]
            behind = (
                streamed[position + slots]
                if position + slots < len(streamed)
                else len(self._order)
            )
            ahead = [*range(number + 1, behind)]
        passed = set(streamed) - {number, *window}
        self._release([one for one in self._there if one.number in passed])
        storages, where = self._storages(layer), f"layer {layer.name}"
        if not self.transfers.prefetch(storages):
            # One layer is to fit, whatever the slots are.
            self._release(self._there - {layer})
        # Before they are there: an interrupt may come in between.
        self._there.add(layer)
        self.transfers.bring_back(storages, where)
        for one in ahead:
            # Old values are released first, which takes the layer from those that are
            # there.
            storages = self._storages(self._order[one])
            self._there.add(self._order[one])
            if not self.transfers.prefetch(storages):
                break

    def evict(self) -> bool:
        """Release the weights of layers that do not compute. Return whether there are
        any."""
        others = self._there.difference([self._fetched, *self._uses])
        self._release(others)
        return bool(others)

    def _storages(self, layer: LayerForward) -> list[SavedStorage]:
        """Return the storages of a layer's weights, without old values on a device."""
        weights = self._weights[layer]
        for weight in weights:
            weight.check_copies()
        if any(weight.is_old for weight in weights):
            self._release([layer])
        return [weight.storage for weight in weights]

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def _release(self, layers: Collection[LayerForward]) -> None:
        """Release the weights of layers on the device."""
        for layer in [*layers]:
            self.transfers.wait_for(
                "h2d", [weight.storage for weight in self._weights[layer]]
            )
            for weight in self._weights[layer]:
                weight.forget()
            self._there.discard(layer)

    def _end_backward(self) -> None:
        for weight in chain.from_iterable(self._weights.values()):
            weight.last = None
        self._is_end_awaited = False
        self._land(lambda _: True)
        if self._measurement is not None:
            self._measurement.end()
        if self._end is not None:
            self._end(self._measurement)
        self._check_writes()
        self._release(self._there)
        # Of weights without a gradient, for which nothing else waits.
        self.transfers.finish("h2d")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _take_writes(self, layer: LayerForward, has_ended: bool = False) -> None:
        """Give a layer its parameters back, with what its forward has written to them.

        The frames of a forward that has not ended may keep the copies."""
        uses = self._uses.get(layer, [])
        for use in uses:
            use.hide()
        for use in uses:
            weight, tensor = use.weight, use.tensor
            values, own = _data(tensor), weight.on_device()
            writes = tensor._version - use.written
            if (
                (writes or tensor.is_data_taken)
                and is_within_backward()
                and self._recomputes(layer)
            ):
                raise EngineError(
                    f"layer {layer.name}: its forward writes {weight.name}, or takes "
                    "its `data`, so it must not be "
                    "computed again: use offload_activations(..., "
                    "activations='offload')"
                )
            if values.data_ptr() != own.data_ptr():
                if (values.shape, values.dtype) != (own.shape, own.dtype):
                    raise EngineError(
                        f"layer {layer.name}: its forward has given {weight.name} "
                        "another shape or dtype through "
                        "`data`: assign it outside of the forward"
                    )
                own.copy_(values)
                _set_data(tensor, own)
            if writes or tensor.is_data_taken:
                assert weight.storage.host is not None
                self.transfers.copy_now(
                    "d2h", bytes_of(own.untyped_storage()), weight.storage.host
                )
                torch._C._autograd._unsafe_set_version_counter(
                    (weight.param,), (weight.param._version + writes,)
                )
                weight.version = weight.param._version
                use.written, use.param = (
                    tensor._version,
                    PackedTensor(weight.param, weight.storage, 0),
                )
            storage = weakref.ref(own.untyped_storage()) if has_ended else _nothing
            weight.copies.append(
                _Copy(storage, weight.param._version, TensorVersion(tensor))
            )
        for use in self._uses.pop(layer, []):
            # Saved tensors refer to it, and would hold the memory.
            del use.tensor

    def _recomputes(self, layer: LayerForward) -> bool:
        return layer.number in self.orders.recomputed

    def _check_writes(self) -> None:
        """Raise EngineError if a weight was written on the device after its layer's
        forward."""
        for weight in chain.from_iterable(self._weights.values()):
            copies = weight.copies
            weight.copies = [one for one in copies if one.storage() is not None]
            if any(one.version.is_changed for one in copies):
                raise EngineError(
                    f"layer {weight.layer.name}: {weight.name} was written after the "
                    "layer's forward through a tensor "
                    "that this has kept, and the write is lost: write to the parameter "
                    "itself"
                )


class _WeightHooks:
    """Hooks of a layer's forward.

    Weights are not saved, and all else as the hooks around it do.
    """

    def __init__(
        self,
        owner: StreamedWeights,
        layer: LayerForward,
        uses: Sequence[_Use],
        outer: Any,
    ) -> None:
        self._owner = owner
        self._layer = layer
        self._outer = outer
        self._uses = {_data(use.tensor).untyped_storage()._cdata: use for use in uses}

    def save(self, tensor: torch.Tensor) -> Any:
        use = (
            self._uses.get(tensor.untyped_storage()._cdata)
            if is_plain(tensor.detach())
            else None
        )
        if use is not None:
            return _SavedWeight(PackedTensor(tensor, use.weight.storage, 0), use)
        return (
            PackedTensor(tensor, None, 0)
            if self._outer is None
            else self._outer[0](tensor)
        )

    def load(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedWeight):
            return self._owner.load(saved, self._layer)
        if self._outer is None:
            saved.check(self._layer.name)
            return saved.get()
        return self._outer[1](saved)
