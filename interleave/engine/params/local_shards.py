"""Local shards, their checks and flat views.

A local shard is this rank's part of a DTensor, or the whole of an ordinary tensor.
"""

import math
import operator
import os
from collections.abc import Sequence
from itertools import pairwise

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.rules.rule import BLOCK

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two sequences have the same objects, in order.

    Sets of tensors take longer: the hash of a tensor is a function of Python.
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_rank() -> int:
    """Return the rank of this process; 0 without others."""
    is_ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (
        torch.distributed.get_rank() if is_ready else int(os.environ.get("RANK", "0"))
    )


def device_of(params: Sequence[torch.Tensor]) -> torch.device:
    """Return the device that parameters are on; the CPU if there are none."""
    return local_shard(params[0]).device if params else torch.device("cpu")


def wrap_shard(param: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded as a parameter is: a DTensor
    where the parameter is one."""
    if not hasattr(param, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(
        shard,
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def wrap_blocks(param: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of a tensor's local part, as `wrap_shard`.

    Zeros fill them up to as many as the longest part has.
    """
    if not hasattr(param, "to_local"):
        return scales
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sizes = list(param.shape)
    for axis, placement in enumerate(param.placements):
        if placement.is_shard():
            sizes[placement.dim] = -(
                -sizes[placement.dim] // param.device_mesh.size(axis)
            )
    padded = torch.zeros(-(-math.prod(sizes) // BLOCK), dtype=scales.dtype)
    padded[: len(scales)] = scales
    placements = [
        Shard(0) if placement.is_shard() else Replicate()
        for placement in param.placements
    ]
    shape, mesh = (parts_of(param) * len(padded),), param.device_mesh
    return DTensor.from_local(
        padded, mesh, placements, run_check=False, shape=shape, stride=(1,)
    )


def parts_of(param: torch.Tensor) -> int:
    """Return the number of parts that a parameter has on its ranks."""
    shards = enumerate(getattr(param, "placements", ()))
    return math.prod(
        param.device_mesh.size(axis)
        for axis, placement in shards
        if placement.is_shard()
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps,
    in any order of dimensions."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != length:
            return not tensor.numel()
        length *= size
    return True


def flat_view(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a dense tensor, flat, in the order of memory.

    Writes to it keep the version.
    """
    shard = local_shard(param).data
    # Without `data` it would hold the tensor that it is a view of.
    return shard.as_strided((shard.numel(),), (1,)).data


def flat_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a tensor flat, in the memory order of a parameter's local part.

    The tensor has the shape of this part.
    """
    shard = local_shard(param)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.stride() != shard.stride():
        tensor = torch.empty_strided(
            shard.shape, shard.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def unflatten(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory with the shape and the order of dimensions of a
    parameter's local part."""
    shard = local_shard(param)
    return flat.as_strided(shard.shape, shard.stride())


def check_params(params: Sequence[torch.Tensor], streamed: bool) -> None:
    """Check the parameters to update. Raises EngineError if an engine cannot update
    them."""
    if not params:
        raise EngineError("there is no parameter that is not frozen: nothing to update")
    devices = {local_shard(param).device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise EngineError(
            f"the parameters are on {len(devices)} devices ({names}): create an "
            "optimizer for each"
        )
    for param in params:
        if local_shard(param).dtype not in _DTYPES:
            raise EngineError(
                f"a parameter is {local_shard(param).dtype}: it must be bfloat16, "
                "float16 or float32"
            )
        if not _is_dense(local_shard(param)):
            raise EngineError(
                "the elements of a parameter do not fill its memory without gaps: "
                "replace it by "
                "param.data.contiguous() first"
            )
    check_apart([local_shard(param) for param in params])
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if has_ranks else 1
    if (
        streamed
        and ranks > 1
        and not all(hasattr(param, "to_local") for param in params)
    ):
        raise EngineError(
            "gradients='streamed' gets gradients before DistributedDataParallel has "
            "reduced them: use "
            "gradients='kept', or shard the model with fully_shard"
        )


def check_apart(values: Sequence[torch.Tensor]) -> None:
    """Raise EngineError if two of these dense tensors of one device share memory.

    Both updates would write it.
    """
    # Those without elements or without memory, as on meta, begin nowhere.
    begins = sorted(
        (value.data_ptr(), number)
        for number, value in enumerate(values)
        if value.numel()
    )
    for (begin, number), (next_begin, other) in pairwise(begins):
        if begin > 0 and next_begin < begin + values[number].nbytes:
            raise EngineError(
                f"parameters {min(number, other)} and {max(number, other)} of this "
                "optimizer share memory: tie weights "
                "by one Parameter in both places (b.weight = a.weight), not by its data"
            )
