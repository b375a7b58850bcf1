"""The layers of a model, and forwards that stand in for theirs."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.devices.opening import open_device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.layers.memory import HostArena, LayerMemoryCount
from ebbtide.interleave.engine.layers.transfers import StorageTransfers
from ebbtide.interleave.model.layer_names import layer_names

# Runs a forward with its positional and named arguments.
Run = Callable[["LayerForward", tuple[Any, ...], dict[str, Any]], Any]


class LayerForward:
    """Stands in for the forward of a layer, in this module alone: copies and pickles of it have their own again.

    Attributes:
        number: The layer's number in the order of the forward; None before its first one.
        is_idle: Whether there is nothing to do but its own forward.
    """

    def __init__(self, name: str, module: torch.nn.Module, run: Run, purpose: str) -> None:
        self.name = name
        self.purpose = purpose
        self.module = module
        # A compiled layer is called in another way.
        self._attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.original = getattr(module, self._attribute)
        self.number: int | None = None
        self._is_own_attribute = self._attribute in vars(module)
        self.is_idle = False
        self._run = run
        setattr(module, self._attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.is_idle else self._run_eagerly(args, kwargs)

    # torch.compile of the whole model has a graph break here.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(self, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.original,)

    def remove(self) -> None:
        if vars(self.module).get(self._attribute) is not self:
            return
        if self._is_own_attribute:
            setattr(self.module, self._attribute, self.original)
        else:
            delattr(self.module, self._attribute)


def _same(value: Any) -> Any:
    return value


def replace_forwards(model: torch.nn.Module, run: Run, purpose: str) -> list[LayerForward]:
    """Let a function run the forwards of a model's layers. Raises EngineError if it has no list of layers.

    The purpose is what it does with them: `activations`, or inside of that `weights`; each may be done once."""
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
        if outer is not None and (outer.purpose, purpose) != ("weights", "activations"):
            raise EngineError(
                f"the {outer.purpose} of layer {name} are moved already: close that first, and stream weights before "
                "activations are offloaded"
            )
    return [LayerForward(name, modules[name], run, purpose) for name in names]


def is_within_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def other_hooks() -> Any:
    """Return the hooks for saved tensors that are in effect; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class MovedLayers:
    """The layers of a model whose forwards are replaced, until `close` or the end of a `with` block."""

    def __init__(self, model: torch.nn.Module, run: Run, purpose: str, memory_budget: float | None) -> None:
        if memory_budget is not None and not (isinstance(memory_budget, int | float) and memory_budget >= 0):
            raise EngineError(f"memory_budget is {memory_budget!r}: it must be bytes, at least 0, or None")
        self._budget_bytes = memory_budget
        self._layers = replace_forwards(model, run, purpose)
        self._transfers: StorageTransfers | None = None

    def _open(self, device: Device | None, torch_device: torch.device, what: str) -> StorageTransfers:
        device = open_device(torch_device) if device is None else device
        memory = LayerMemoryCount(device, self._budget_bytes, what)
        self._transfers = StorageTransfers(device, memory, HostArena(device))
        return self._transfers

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
        for layer in self._layers:
            layer.remove()
        if self._transfers is not None:
            self._transfers.arena.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def storages_of(*modules: torch.nn.Module) -> set[int]:
    """Return the keys of the storages of parameters and buffers."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor.data) is torch.Tensor}


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
