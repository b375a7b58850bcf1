"""Local shards: the part of a DTensor that this rank has, or the whole of an ordinary tensor; and their flat views."""

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


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps, in any order of dimensions."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != length:
            return not tensor.numel()
        length *= size
    return True


def has_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether something else has the memory of a tensor, too, as a view of it does."""
    storage = tensor.untyped_storage()
    # One of the tensor, and one of this variable.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def flat_view(param: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank's part of a dense tensor, with one dimension, in the order of the memory.

    Writes to it do not count as versions of the tensor."""
    shard = local_shard(param).data
    return shard.as_strided((shard.numel(),), (1,))


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape of a parameter's local part, flat, in the order of the memory of that part.

    The result shares memory with the tensor if both have the same order."""
    shard = local_shard(param)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.stride() != shard.stride():
        tensor = torch.empty_strided(shard.shape, shard.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def unflatten(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory with the shape and the order of dimensions of a parameter's local part."""
    shard = local_shard(param)
    return flat.as_strided(shard.shape, shard.stride())
