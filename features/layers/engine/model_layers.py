"""The layers of a model, and forwards that stand in for theirs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.features.layers.engine.measurement import PassMeasurement
from ebbtide.features.layers.engine.memory import HostArena, LayerMemoryCount
from ebbtide.features.layers.engine.orders import ONE_AT_A_TIME, LayerOptions, LayerOrders, plan_orders
from ebbtide.features.layers.engine.transfers import StorageTransfers
from ebbtide.features.layers.layer_names import layer_names
from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import open_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.options import budget_bytes, check_budget_bytes
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.schedule import Schedule

log = logging.getLogger("ebbtide")


class LayerForward:
    """Stands in for the forward of a layer, in this module alone: copies and pickles of it have their own again.

    Attributes:
        number: The layer's number in the order of the forward; None before its first one.
        is_idle: Whether there is nothing to do but its own forward.
    """

    def __init__(self, name: str, module: torch.nn.Module, owner: "MovedLayers") -> None:
        self.name = name
        self.owner = owner
        self.module = module
        # A compiled layer is called in another way.
        self._attribute = "_compiled_call_impl" if is_compiled(module) else "forward"
        self.original = getattr(module, self._attribute)
        self.number: int | None = None
        self._is_own_attribute = self._attribute in vars(module)
        self.is_idle = False
        setattr(module, self._attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.is_idle else self._run_eagerly(args, kwargs)

    # torch.compile of the whole model has a graph break here.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_hooks = other_hooks() is not None
        try:
            return self.owner.run(self, args, kwargs)
        except RuntimeError as error:
            if has_hooks or not str(error).startswith("torch.func"):
                raise
            raise EngineError(
                f"layer {self.name}: torch.func refuses the hooks by which its {self.owner.what} move: let the layer "
                "use torch.autograd.grad instead, or close what moves its weights and activations"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.original,)

    def remove(self) -> None:
        self.is_idle = True
        if vars(self.module).get(self._attribute) is not self:
            return
        if self._is_own_attribute:
            setattr(self.module, self._attribute, self.original)
        else:
            delattr(self.module, self._attribute)
        if isinstance(self.original, LayerForward) and self.original.is_idle:
            # It was closed before.
            self.original.remove()


def _same(value: Any) -> Any:
    return value


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled in place. Recorders replace the attribute of the class."""
    return vars(module).get("_compiled_call_impl") is not None


def replace_forwards(model: torch.nn.Module, owner: "MovedLayers") -> list[LayerForward]:
    """Let an owner run the forwards of a model's layers. Raises EngineError if it has no list of layers.

    Activations are moved around weights; each may be done once."""
    sizes = (
        (name, param.numel() * param.element_size())
        for name, module in model.named_modules()
        for param in module.parameters(recurse=False)
    )
    modules = dict(model.named_modules())
    names = [*dict.fromkeys(layer_names(modules, sizes).values())]
    if len(names) < 2:
        raise EngineError(
            f"{type(model).__name__} has no list of layers with parameters: its layers must be in a ModuleList or a "
            "Sequential"
        )
    for name in names:
        outer = next((one for one in vars(modules[name]).values() if isinstance(one, LayerForward)), None)
        if outer is not None and (outer.owner.what, owner.what) != ("weights", "activations"):
            raise EngineError(
                f"the {outer.owner.what} of layer {name} are moved already: close that first, and stream "
                "weights before activations are offloaded"
            )
    return [LayerForward(name, modules[name], owner) for name in names]


def is_within_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def other_hooks() -> Any:
    """Return the hooks for saved tensors that are in effect; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class MovedLayers:
    """The layers of a model whose forwards are replaced, until `close` or the end of a `with` block.

    Attributes:
        what: `weights` or `activations`.
        choices_of: The values of the argument that chooses for all layers.
    """

    what: str
    choices_of: Sequence[str]

    def __init__(self, model: torch.nn.Module, memory_budget: float | str | None, choice: str) -> None:
        if choice not in self.choices_of:
            raise EngineError(f"{self.what}={choice!r}: choose from {', '.join(self.choices_of)}")
        self._budget_bytes = budget_bytes(memory_budget)
        if memory_budget is not None:
            check_budget_bytes(self._budget_bytes, "None")
        self.option = choice
        self._layers = replace_forwards(model, self)
        # Those that have run, in the order of the forward.
        self._order: list[LayerForward] = []
        self._transfers: StorageTransfers | None = None
        self.orders: LayerOrders = ONE_AT_A_TIME
        self.is_closed = False

    def run(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer's forward as the orders say."""
        raise NotImplementedError

    def _open(self, device: Device | None, torch_device: torch.device) -> StorageTransfers:
        device = open_device(torch_device) if device is None else device
        memory = LayerMemoryCount(device, {self.what: self._budget_bytes})
        self._transfers = StorageTransfers(device, memory, HostArena(device))
        return self._transfers

    def _limit_bytes(self) -> float | None:
        """Return the device memory that they may use; None: no limit."""
        assert self._transfers is not None
        device, memory = self._transfers.device, self._transfers.memory
        free = device.free_bytes()
        if free is not None:
            # The job's own peak, which is not free, has this memory at its peak.
            free = max(0.0, free + memory.peak_bytes - device.used_bytes)
        return min((limit for limit in (memory.limit_bytes, free) if limit is not None), default=None)

    def _is_left_by(self, other: "MovedLayers | None") -> bool:
        """Return whether those that shared the memory were closed, and take their budget from it."""
        if other is None or not other.is_closed:
            return False
        assert self._transfers is not None
        self._transfers.memory.budgets.pop(other.what)
        return True

    def _number(self, layer: LayerForward) -> int:
        """Return the number of a layer, the next one in its first forward."""
        if layer.number is None:
            layer.number = len(self._order)
            self._order.append(layer)
        return layer.number

    def _plan(self, measured: PassMeasurement, weights: Sequence[tuple[int, int]], options: LayerOptions) -> None:
        """Set the orders of the best plan for layers that were measured; `weights`: see `StreamedWeights.sizes`."""
        assert self._transfers is not None
        layers = measured.layers([layer.name for layer in self._order], weights)
        budget, rates = self._limit_bytes(), self._transfers.rates()
        self._transfers.measures = False
        budget = None if budget is None else max(0.0, budget - measured.left_bytes)
        orders = plan_orders(layers, budget, rates, options, measured.outside())
        self.orders = orders if orders.plan is None else replace(orders, left=frozenset(measured.left))
        log.info("ebbtide: %s of layers: %s", self.what, ", ".join(map(" ".join, self.choices.items())))

    def _choice(self, layer: int) -> str:
        """Return what the orders of the last pass say of a layer."""
        raise NotImplementedError

    @property
    def choices(self) -> dict[str, str]:
        """By layer, in the order of the forward, of the last pass: `keep`, `recompute`, `offload` or
        `recompute-offload` for activations, `resident` or `streamed` for weights."""
        # While all is kept, layers do not count themselves.
        numbers = {layer.name: len(self._layers) if layer.number is None else layer.number for layer in self._layers}
        return {name: self._choice(numbers[name]) for name in sorted(numbers, key=numbers.__getitem__)}

    @property
    def plan(self) -> Plan | None:
        """The plan of the last pass; None of the first passes, and where nothing limits the memory."""
        return self.orders.plan

    @property
    def predicted(self) -> Schedule | None:
        """The simulated iteration of the plan: from one pass to the next, one forward and backward."""
        return self.orders.predicted

    @property
    def peak_bytes(self) -> int:
        """The most device memory that they have used, in bytes."""
        return 0 if self._transfers is None else self._transfers.memory.peak_bytes

    @property
    def used_bytes(self) -> int:
        """The device memory that they use now, in bytes."""
        return 0 if self._transfers is None else self._transfers.memory.used_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory of what was offloaded, in bytes."""
        return 0 if self._transfers is None else self._transfers.arena.allocated_bytes

    def close(self) -> None:
        """Give the layers their own forwards back. Backwards of passes that have begun still work."""
        self.is_closed = True
        for layer in self._layers:
            layer.remove()
        if self._transfers is not None:
            self._transfers.arena.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def storages_of(module: torch.nn.Module) -> set[int]:
    """Return the keys of the storages of parameters and buffers."""
    tensors = chain(module.parameters(), module.buffers())
    return {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor.data) is torch.Tensor}


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
