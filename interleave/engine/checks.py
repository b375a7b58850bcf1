"""Checks of the options, parameters and gradients that InterleavedAdamW gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.local_shards import flat_like, is_dense, local_shard
from ebbtide.interleave.policies import POLICIES, parse
from ebbtide.interleave.policies.overlap import OVERLAP
from ebbtide.phases import PHASES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_options(
    gradients: str, subgroup_params: int, threads: int | None, budget: Any, max_grad_norm: float | None = None
) -> None:
    """Check the options of InterleavedAdamW; budget is its `memory_budget`. Raises EngineError if one is not valid."""
    if gradients not in ("kept", "streamed"):
        raise EngineError(f"gradients is {gradients!r}: it must be 'kept' or 'streamed'")
    if subgroup_params < 1:
        raise EngineError(f"subgroup_params is {subgroup_params}: it must be at least 1")
    if threads is not None and threads < 1:
        raise EngineError(f"threads is {threads}: it must be at least 1, or None")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise EngineError(f"max_grad_norm is {max_grad_norm}: it must be above 0, or None")
    by_phase = isinstance(budget, Mapping)
    if by_phase and set(budget) != set(PHASES):
        raise EngineError(f"memory_budget by phase has {', '.join(map(str, budget))}: it needs {', '.join(PHASES)}")
    for size in budget.values() if by_phase else (budget,):
        if size is not None and not (isinstance(size, int | float) and size >= 0):
            raise EngineError(f"memory_budget is {size!r}: it must be bytes, at least 0, or a dict of bytes by phase")


def with_overlap_option(policy: str, overlap: str, gradients: str, has_model: bool) -> str:
    """Return the policy with the option `overlap`.

    `auto` is without updates under the forward where there is no model that waits for them, and none at all where the
    policy has no overlap.

    Raises:
        EngineError: The policy has another one, or there is no such overlap with gradients of this kind.
    """
    if overlap not in OVERLAP:
        raise EngineError(f"overlap is {overlap!r}: it must be one of {', '.join(OVERLAP)}")
    if overlap in ("backward", "both") and gradients != "streamed":
        raise EngineError(
            f"overlap is {overlap!r} and gradients are {gradients!r}: updates inside the backward need "
            "gradients='streamed'"
        )
    if overlap == "auto" and "overlap" not in POLICIES[parse(policy).name].options:
        overlap = "none"
    elif overlap == "auto" and not has_model:
        overlap = "backward" if gradients == "streamed" else "none"
    if overlap == "none" or f"overlap={overlap}" in policy:
        return policy
    if "overlap=" in policy:
        raise EngineError(f"policy is {policy!r} and overlap {overlap!r}: they must not contradict each other")
    return f"{policy},overlap={overlap}"


def check_group(group: dict[str, Any]) -> None:
    """Check the hyperparameters of a parameter group. Raises EngineError if one is not valid or not supported."""
    try:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
    except (TypeError, ValueError):
        raise EngineError("lr, eps and weight_decay must be numbers, betas two numbers") from None
    if not (all(0 <= rate < math.inf for rate in (lr, eps, weight_decay)) and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise EngineError(
            "lr, eps and weight_decay must be at least 0, betas at least 0 and below 1: they are "
            f"{lr:g}, {eps:g}, {weight_decay:g} and {beta1:g}, {beta2:g}"
        )
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise EngineError(f"{name} is not supported: leave it off")


def check_master(master: str, policy: str) -> None:
    """Check the option `master` of InterleavedAdamW beside the overlap of a policy. Raises EngineError."""
    if master not in ("fp32", "remainder"):
        raise EngineError(f"master is {master!r}: it must be 'fp32' or 'remainder'")
    if master == "fp32":
        return
    if parse(policy).options.get("overlap", "none") not in ("none", "forward"):
        raise EngineError(
            "master='remainder' is not supported with updates inside the backward: use overlap='none' or 'forward'"
        )


def check_params(params: Sequence[torch.Tensor], streamed: bool, has_remainders: bool = False) -> None:
    """Check the parameters to update. Raises EngineError if an engine cannot update them."""
    if not params:
        raise EngineError("there is no parameter that is not frozen: nothing to update")
    devices = {local_shard(param).device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise EngineError(f"the parameters are on {len(devices)} devices ({names}): create an optimizer for each")
    for param in params:
        if local_shard(param).dtype not in _DTYPES:
            raise EngineError(f"a parameter is {local_shard(param).dtype}: it must be bfloat16, float16 or float32")
        if has_remainders and local_shard(param).dtype != torch.bfloat16:
            raise EngineError(
                f"a parameter is {local_shard(param).dtype}: master='remainder' is for bfloat16 parameters only; use "
                "master='fp32'"
            )
        if not is_dense(local_shard(param)):
            raise EngineError(
                "the elements of a parameter do not fill its memory without gaps: replace it by "
                "param.data.contiguous() first"
            )
    check_apart([local_shard(param) for param in params])
    if streamed and _rank_count() > 1 and not all(hasattr(param, "to_local") for param in params):
        raise EngineError(
            "gradients='streamed' gets gradients before DistributedDataParallel has reduced them: use "
            "gradients='kept', or shard the model with fully_shard"
        )


def check_apart(values: Sequence[torch.Tensor]) -> None:
    """Raise EngineError if two of these dense tensors of one device share memory: both updates would write it."""
    # Those without elements or without memory, as on meta, begin nowhere.
    begins = sorted((value.data_ptr(), number) for number, value in enumerate(values) if value.numel())
    for (begin, number), (next_begin, other) in pairwise(begins):
        if begin > 0 and next_begin < begin + values[number].nbytes:
            raise EngineError(
                f"parameters {min(number, other)} and {max(number, other)} of this optimizer share memory: tie weights "
                "by one Parameter in both places (b.weight = a.weight), not by its data"
            )


def flat_gradient(param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, flat, in the order of the parameter's memory.

    Raises:
        EngineError: If the gradient is sparse or has another dtype than the parameter.
    """
    assert param.grad is not None
    gradient = local_shard(param.grad).detach()
    dtype = local_shard(param).dtype
    if gradient.is_sparse or gradient.dtype != dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise EngineError(f"a gradient is {kind} and its parameter {dtype}: it must be dense, of the same dtype")
    return flat_like(gradient, param)


def _rank_count() -> int:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if initialized else 1
