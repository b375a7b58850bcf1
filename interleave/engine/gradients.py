"""All gradients of a step together: whether they are finite, and by how much they are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.numerics.norm import total

# As torch.nn.utils.clip_grad_norm_ has it.
_EPS = 1e-6


class Gradients:
    """max_norm: what the norm of all gradients, over all ranks that share the parameters, is clipped to; None: not."""

    def __init__(self, device: Device, max_norm: float | None) -> None:
        if max_norm is not None and not max_norm > 0:
            raise EngineError(f"max_grad_norm is {max_norm}: it must be above 0, or None")
        self._device = device
        self._max_norm = max_norm
        self._squares: dict[int, Callable[[], float]] = {}

    def note(self, param: int, gradient: torch.Tensor) -> None:
        """The gradient of a parameter, by its index, as it is now."""
        self._squares[param] = self._device.squares(gradient)

    def forget(self) -> None:
        self._squares.clear()

    def scale(self, params: Sequence[torch.Tensor], loss_scale: float = 1.0) -> float | None:
        """What each gradient is to be multiplied with, of all that were noted since the last time; None where one is
        not finite. loss_scale: what they were multiplied with before."""
        squares = [self._squares[index]() if index in self._squares else 0.0 for index in range(len(params))]
        self._squares.clear()
        norm = math.sqrt(_over_ranks(params, squares)) / loss_scale
        if not math.isfinite(norm):
            return None
        clipped = min(1.0, self._max_norm / (norm + _EPS)) if self._max_norm is not None else 1.0
        return clipped / loss_scale


def _over_ranks(params: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
    """The sum over all gradients; of parameters that ranks hold shards of, over all shards. To the same bits on every
    rank, all of which must call it."""
    own = []
    shared: dict[Any, list[float]] = {}
    for param, of_param in zip(params, squares, strict=True):
        if hasattr(param, "to_local"):
            shared.setdefault((param.device_mesh, param.placements), []).append(of_param)
        else:
            own.append(of_param)
    for (mesh, placements), of_shards in shared.items():
        summed = total(of_shards)
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                summed = _gathered(summed, mesh.get_group(dimension), mesh.device_type)
        own.append(summed)
    return total(own)


def _gathered(value: float, group: Any, device: str) -> float:
    here = torch.tensor([value], dtype=torch.float64, device=device)
    there = [torch.empty_like(here) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(there, here, group=group)
    return total(tensor.item() for tensor in there)
