"""Local shards: the part of a DTensor that this rank has, or the whole of an ordinary tensor."""

from __future__ import annotations

import torch


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def wrap_shard(param: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded as a parameter is, as a DTensor where the parameter is one.

    Args:
        param: The parameter, which gives the mesh and the placements.
        shard: The local part, of the shape of the parameter's local part.
    """
    if not hasattr(param, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
