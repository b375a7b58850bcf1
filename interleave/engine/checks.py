"""What InterleavedAdamW takes, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.state_dict import local

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# As a budget by phase names them.
_PHASES = ("forward", "backward", "update")


def check_options(gradients: str, subgroup_params: int, threads: int | None, budget: Any) -> None:
    """Raise EngineError for what InterleavedAdamW cannot be asked for. budget: its memory_budget."""
    if gradients not in ("kept", "streamed"):
        raise EngineError(f"gradients is {gradients!r}: it must be 'kept' or 'streamed'")
    if subgroup_params < 1:
        raise EngineError(f"subgroup_params is {subgroup_params}: it must be at least 1")
    if threads is not None and threads < 1:
        raise EngineError(f"threads is {threads}: it must be at least 1, or None")
    by_phase = isinstance(budget, Mapping)
    if by_phase and set(budget) != set(_PHASES):
        raise EngineError(f"memory_budget by phase has {', '.join(map(str, budget))}: it needs {', '.join(_PHASES)}")
    for size in budget.values() if by_phase else (budget,):
        if size is not None and not (isinstance(size, int | float) and size >= 0):
            raise EngineError(f"memory_budget is {size!r}: it must be bytes, at least 0, or a dict of them by phase")


def check_group(group: dict[str, Any]) -> None:
    """Raise EngineError for hyperparameters that cannot be."""
    try:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
    except (TypeError, ValueError):
        raise EngineError("lr, eps and weight_decay must be numbers, betas two of them") from None
    if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise EngineError("lr, eps and weight_decay must be at least 0, betas at least 0 and below 1")
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise EngineError(f"{name} is not something this optimizer does")


def check_params(params: Sequence[torch.Tensor], streams: bool) -> None:
    """Raise EngineError for parameters that no engine can update. streams: whether gradients leave as they are made."""
    if not params:
        raise EngineError("there is no parameter that is not frozen: nothing to update")
    devices = {local(param).device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise EngineError(f"the parameters are on {len(devices)} devices ({names}): make an optimizer for each")
    for param in params:
        if local(param).dtype not in _DTYPES:
            raise EngineError(f"a parameter is {local(param).dtype}: it must be bfloat16, float16 or float32")
        if not local(param).is_contiguous():
            raise EngineError("a parameter is not contiguous: replace it by param.data.contiguous() before")
    if streams and _ranks() > 1 and not all(hasattr(param, "to_local") for param in params):
        raise EngineError(
            "gradients='streamed' sees gradients before DistributedDataParallel has reduced them: use "
            "gradients='kept', or shard the model with fully_shard"
        )


def flat_gradient(param: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, flat. Raises EngineError for one of another kind than the parameter."""
    assert param.grad is not None
    gradient = local(param.grad).detach()
    if gradient.is_sparse or gradient.dtype != local(param).dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise EngineError(f"a gradient is {kind} where its parameter is {local(param).dtype}: it must be alike")
    return gradient.reshape(-1)


def _ranks() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if there else 1
