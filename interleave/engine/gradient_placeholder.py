"""Placeholders in `p.grad` for gradients that were offloaded to the host."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.local_shards import local_shard, wrap_shard

_aten = torch.ops.aten
# Operations that return the same tensor; DTensor applies them when it wraps a local tensor.
_ALIASES = (_aten.view.default, _aten.detach.default, _aten.alias.default)
# Autograd adds a gradient to the existing one, FSDP2 does so in place.
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)


class GradientPlaceholder(torch.Tensor):  # type: ignore[misc]
    """A tensor with the shape of a gradient and no values: every computation with it raises EngineError.

    Gradients that a backward adds to it are stored, in order. Placeholders are also inside DTensors, so this class
    intercepts operations (`__torch_dispatch__`) and not function calls.
    """

    _added: list[torch.Tensor]
    _used: list[bool]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> GradientPlaceholder:
        placeholder: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        placeholder._added, placeholder._used = [], []
        return placeholder

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function in _ALIASES:
            alias = GradientPlaceholder(args[0])
            alias._added, alias._used = args[0]._added, args[0]._used
            return alias
        if function in _ADDITIONS and isinstance(args[0], GradientPlaceholder) and not kwargs:
            if args[0]._used:
                raise EngineError("a gradient of the previous step is still in p.grad: call zero_grad() after step()")
            args[0]._added.append(args[1].detach().clone())
            return args[0]
        raise EngineError(
            "streamed gradients are copied to the host as soon as they are computed: let the optimizer clip "
            "(max_grad_norm=) and scale (loss_scale=, and optimizer.scale(loss)), let zero_grad() set them to None, or "
            "use gradients='kept'"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"GradientPlaceholder(shape={tuple(self.shape)})"


def make_placeholder(param: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for the gradient of a parameter: a DTensor where the parameter is one."""
    return wrap_shard(param, GradientPlaceholder(local_shard(param).detach()))


def added_gradients(placeholder: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients that backwards have added to a placeholder; only this rank's part."""
    added: list[torch.Tensor] = local_shard(placeholder)._added
    return added


def mark_used(placeholder: torch.Tensor) -> None:
    """Mark that a step has used the gradient of a placeholder: nothing can be added to it from now on."""
    local_shard(placeholder)._used.append(True)
