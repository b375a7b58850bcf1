"""The norm of all gradients of a step: whether it is finite, and the factor that scales and clips each gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.devices.device import Device
from ebbtide.interleave.engine.numerics.norm import total

# The same as in torch.nn.utils.clip_grad_norm_.
_EPS = 1e-6


class GradientNorm:
    """Adds up the squares of a step's gradients, and returns the factor that scales and clips them.

    Args:
        device: The device that computes the sums of squares.
        max_norm: The maximum norm of all gradients, over all ranks that share the parameters; None to not clip.
    """

    def __init__(self, device: Device, max_norm: float | None) -> None:
        self._device = device
        self._max_norm = max_norm
        # The indices of parameters, and the function that waits for the sums of squares of their gradients.
        self._pending: list[tuple[Sequence[int], Callable[[], list[float]]]] = []

    def add_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the gradients of parameters, given by their index, with the values that they have now.

        Their squares are work of the calling thread, like what computed them: memory that is freed or written by later
        work of that thread holds them long enough."""
        if gradients:
            self._pending.append((list(gradients), self._device.sums_of_squares(list(gradients.values()))))

    def clear(self) -> None:
        """Drop all gradients that were added."""
        self._pending.clear()

    def scale_factor(self, params: Sequence[torch.Tensor], loss_scale: float = 1.0) -> float | None:
        """Return the factor to multiply each gradient with, and drop the gradients that were added.

        Args:
            params: All parameters, in the order of their indices.
            loss_scale: The factor that the gradients were multiplied with before.

        Returns:
            The factor, or None if a gradient is not finite.
        """
        sums: dict[int, float] = {}
        # From the last to the first: when the last are there, there is nothing to wait for in the others.
        for indices, wait in reversed(self._pending):
            for index, value in zip(indices, wait(), strict=True):
                # One that was added again, after an interrupt, has its last values.
                sums.setdefault(index, value)
        self.clear()
        squares = [sums.get(index, 0.0) for index in range(len(params))]
        norm = math.sqrt(_sum_over_ranks(params, squares)) / loss_scale
        if not math.isfinite(norm):
            return None
        clip_factor = min(1.0, self._max_norm / (norm + _EPS)) if self._max_norm is not None else 1.0
        return clip_factor / loss_scale


def _sum_over_ranks(params: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
    """Return the sum over all gradients, with all shards of the parameters that are sharded over ranks.

    The result has the same bits on every rank. All ranks must call this."""
    sums = []
    sharded: dict[Any, list[float]] = {}
    for param, square in zip(params, squares, strict=True):
        if hasattr(param, "to_local"):
            sharded.setdefault((param.device_mesh, param.placements), []).append(square)
        else:
            sums.append(square)
    for (mesh, placements), shard_squares in sharded.items():
        shard_sum = total(shard_squares)
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                shard_sum = _sum_over_group(shard_sum, mesh.get_group(dimension), mesh.device_type)
        sums.append(shard_sum)
    return total(sums)


def _sum_over_group(value: float, group: Any, device: str) -> float:
    own_value = torch.tensor([value], dtype=torch.float64, device=device)
    values = [torch.empty_like(own_value) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(values, own_value, group=group)
    # One copy to the host for all ranks.
    return total(torch.cat(values).tolist())
