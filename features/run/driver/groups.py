"""Torch's parameter groups as groups of an engine, and what an engine cannot update."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from ebbtide.interleave.engine.param_updater import ParamUpdater
from ebbtide.interleave.engine.params.local_shards import local_shard
from ebbtide.interleave.engine.rules.rule import find_rule

# Options of torch's optimizers that no rule has.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")
# The end of a rule's name for parameters of a type.
_ENDINGS = {torch.float32: "", torch.bfloat16: "-pure-bf16"}
# Older versions of torch have no Muon.
MUON: Any = getattr(torch.optim, "Muon", None)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def engine_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an engine that updates as torch does.

    A group of torch is one for each type of its parameters.
    """
    groups = []
    for group in optimizer.param_groups:
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in group["params"]:
            by_type.setdefault(local_shard(param).dtype, []).append(param)
        for dtype, params in by_type.items():
            name = _rule_name(optimizer, group) + _ENDINGS.get(dtype, "")
            rule = find_rule(name)
            own = {key: group[key] for key in rule.defaults if key in group}
            groups.append({**own, "params": params, "rule": name})
    return groups


def follow_groups(
    updater: ParamUpdater, optimizer_ref: weakref.ref[torch.optim.Optimizer]
) -> None:
    """Let an engine have the hyperparameters that an optimizer has now."""
    optimizer = optimizer_ref()
    if optimizer is not None:
        updater.param_groups = engine_groups(optimizer)


def _rule_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if _is_muon(optimizer):
        return "muon"
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    return "adamw" if group.get("decoupled_weight_decay", is_adamw) else "adam"


def _is_muon(optimizer: torch.optim.Optimizer) -> bool:
    return MUON is not None and isinstance(optimizer, MUON)


def is_driven(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a driver does the steps of a class."""
    return bool(getattr(kind.step, "is_driven", False))


def unsupported_option(optimizer: torch.optim.Optimizer) -> str | None:
    """Return an option of a group that no engine has, as a reason; None without."""
    for name in _UNSUPPORTED:
        if any(group.get(name) for group in optimizer.param_groups):
            return f"the option {name} is set"
    return None


def reason_to_leave(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why torch is to update an optimizer, None if an engine can."""
    if not is_driven(type(optimizer)):
        return f"{type(optimizer).__qualname__} has a step of its own"
    if reason := unsupported_option(optimizer):
        return reason
    if torch._C._current_graph_task_id() != -1:
        return "it steps inside of the backward"
    params = [param for param in params_of(optimizer) if param.requires_grad]
    types = {local_shard(param).dtype for param in params}
    # Without masters in fp32, Muon has no rule.
    supported = {torch.float32} if _is_muon(optimizer) else {*_ENDINGS}
    others = sorted(str(dtype) for dtype in types - supported)
    if others:
        return f"parameters are {', '.join(others)}"
    grads = [param.grad for param in params if param.grad is not None]
    if any(local_shard(grad).layout != torch.strided for grad in grads):
        return "gradients are sparse"
    return None
