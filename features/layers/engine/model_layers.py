"""The layers of a model, and forwards that stand in for theirs."""

from itertools import chain
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.layer_names import layer_names

# The number of a layer whose forward has not run: behind all others.
NOT_RUN = 2**62


class LayerRunner(Protocol):
    """Runs the layers of a model in the place of their forwards."""

    def run(
        self, layer: "LayerForward", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer, and move its weights and activations."""

    def compute(
        self, layer: "LayerForward", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the layer's own forward with its weights on the device."""


class LayerForward:
    """Stands in for the forward of a layer, in this module alone.

    Copies and pickles of the module have their own again.

    Attributes:
        number: The layer's number in the order of the forward; NOT_RUN before its first
            one.
        is_idle: Whether there is nothing to do but its own forward.
    """

    def __init__(self, name: str, module: torch.nn.Module, owner: LayerRunner) -> None:
        self.name = name
        self.owner = owner
        self.module = module
        # A compiled layer is called in another way.
        self._attribute = "_compiled_call_impl" if is_compiled(module) else "forward"
        self.original = getattr(module, self._attribute)
        self.number = NOT_RUN
        self._is_own_attribute = self._attribute in vars(module)
        self.is_idle = False
        setattr(module, self._attribute, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self.original(*args, **kwargs)
            if self.is_idle
            else self._run_eagerly(args, kwargs)
        )

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the layer's own forward with its weights on the device."""
        return self.owner.compute(self, args, kwargs)

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
                f"layer {self.name}: torch.func refuses the hooks by which its weights "
                "and activations move: let the "
                "layer use torch.autograd.grad instead, or close what move_layers "
                "returned"
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


def _same(value: Any) -> Any:
    return value


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled in place. Recorders replace the attribute of
    the class."""
    return vars(module).get("_compiled_call_impl") is not None


def layer_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of a model by name. Raises EngineError if it has no list of
    layers."""
    sizes = (
        (name, param.numel() * param.element_size())
        for name, module in model.named_modules()
        for param in module.parameters(recurse=False)
    )
    modules = dict(model.named_modules())
    names = [*dict.fromkeys(layer_names(modules, sizes).values())]
    if len(names) < 2:
        raise EngineError(
            f"{type(model).__name__} has no list of layers with parameters: its layers "
            "must be in a ModuleList or a "
            "Sequential"
        )
    return {name: modules[name] for name in names}


def forward_of(module: torch.nn.Module) -> LayerForward | None:
    """Return what stands in for a module's forward; None if nothing does."""
    return next(
        (one for one in vars(module).values() if isinstance(one, LayerForward)), None
    )


def is_within_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def other_hooks() -> Any:
    """Return the hooks for saved tensors that are in effect; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def storages_of(module: torch.nn.Module) -> set[int]:
    """Return the keys of the storages of parameters and buffers."""
    tensors = chain(module.parameters(), module.buffers())
    return {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if type(tensor.data) is torch.Tensor
    }


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
