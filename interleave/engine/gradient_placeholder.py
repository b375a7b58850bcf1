"""What stands in `p.grad` for a gradient that has left for the host."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.state_dict import like, local

_aten = torch.ops.aten
# Another name for the same tensor: as a DTensor takes it in.
_ALIASES = (_aten.view.default, _aten.detach.default, _aten.alias.default)
# Autograd adds a gradient to the one that is there, FSDP2 in place.
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)


class Streamed(torch.Tensor):  # type: ignore[misc]
    """Has a gradient's shape and no gradient: whoever computes with it is told. What a backward adds to it is kept, in
    order. Beneath DTensors too, so it looks at what is computed, not at what is called."""

    _added: list[torch.Tensor]
    _spent: list[bool]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Streamed:
        found: Streamed = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        found._added, found._spent = [], []
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function in _ALIASES:
            alias = Streamed(args[0])
            alias._added, alias._spent = args[0]._added, args[0]._spent
            return alias
        if function in _ADDITIONS and isinstance(args[0], Streamed) and not kwargs:
            if args[0]._spent:
                raise EngineError("a gradient of the step before is still in p.grad: call zero_grad() after step()")
            args[0]._added.append(args[1].detach().clone())
            return args[0]
        raise EngineError(
            "gradients leave for the host as soon as they are made: let the optimizer clip (max_grad_norm=) and scale "
            "(loss_scale=, and optimizer.scale(loss)), zero_grad() set them to None, or keep them (gradients='kept')"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Streamed(shape={tuple(self.shape)})"


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """For a parameter's gradient; for a DTensor's a DTensor."""
    return like(param, Streamed(local(param).detach()))


def added(grad: torch.Tensor) -> list[torch.Tensor]:
    """What backwards have added to a stand-in; this rank's part."""
    found: list[torch.Tensor] = local(grad)._added
    return found


def spend(grad: torch.Tensor) -> None:
    """The gradient that this stands for has been used: nothing can be added to it."""
    local(grad)._spent.append(True)
