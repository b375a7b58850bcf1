"""What stands in `p.grad` for a gradient that has left for the host."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.portable import like, local


class Streamed(torch.Tensor):  # type: ignore[misc]
    """Has a gradient's shape and no gradient: whoever computes with it is told."""

    @staticmethod
    def of(param: torch.Tensor) -> torch.Tensor:
        """For a parameter; for a DTensor a plain one of zeros."""
        here = local(param)
        found = torch.zeros((), dtype=here.dtype, device=here.device).expand(here.shape)
        return found.as_subclass(Streamed) if here is param else like(param, found)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(function, "__name__", "") == "__get__" or function is torch.Tensor.as_subclass:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise EngineError(
            "gradients leave for the host as soon as they are made: let the optimizer clip (max_grad_norm=) and scale "
            "(loss_scale=, and optimizer.scale(loss)), or keep them with gradients='kept'"
        )
