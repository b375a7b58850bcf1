"""Sizes of a model and its optimizers: counts, bytes and data types on this rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .zero_optimizer import (
    fp32_masters,
    has_state_in_other_process,
    is_deepspeed_object,
    local_tensor,
    subgroup_sizes,
    swaps_to_disk,
    torch_optimizers,
    total_elements,
)


def describe_model(modules: list[Any], optimizers: list[Any]) -> dict[str, Any]:
    """Return the trace's `model` entry: of the outermost modules, which together are the model.

    Its `params` counts the parameters whose optimizer state is on this rank.
    """
    modules = [m.module if is_deepspeed_object(m) and hasattr(m, "module") else m for m in modules]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    tensors = [local_tensor(p) for p in parameters]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[_dtype(tensor)] += tensor.numel()
    partitions = [sizes for sizes in map(subgroup_sizes, optimizers) if sizes is not None]
    return {
        # A loss is a module too; one without parameters is not a model.
        "classes": sorted({type(m).__name__ for m in modules if any(True for _ in m.parameters())}),
        "params": sum(map(sum, partitions)) if partitions else sum(dtypes.values()),
        "total_params": sum(map(total_elements, parameters)),
        "trainable_params": sum(t.numel() for p, t in zip(parameters, tensors) if p.requires_grad),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "dtypes": dict(dtypes),
    }


def describe_optimizers(optimizers: list[Any]) -> list[dict[str, Any]]:
    """Describe the optimizers, with one entry per class: a job that steps in the backward has one per parameter."""
    by_class: dict[str, list[Any]] = {}
    for optimizer in optimizers:
        by_class.setdefault(type(torch_optimizers(optimizer)[0]).__name__, []).append(optimizer)
    return [{"class": name, **_describe_class(same_class)} for name, same_class in by_class.items()]


def _describe_class(optimizers: list[Any]) -> dict[str, Any]:
    groups = [group for optimizer in optimizers for group in torch_optimizers(optimizer)[0].param_groups]
    parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
    description = {
        "count": len(optimizers),
        "groups": len(groups),
        "params": sum(sum(subgroup_sizes(o) or [local_tensor(p).numel() for p in _parameters(o)]) for o in optimizers),
        "param_dtypes": sorted({_dtype(p) for p in parameters}),
    }
    if any(map(swaps_to_disk, optimizers)):
        return {**description, "state_devices": ["nvme"]}
    if any(map(has_state_in_other_process, optimizers)):
        return {**description, "state_devices": ["cpu"]}
    state = [local_tensor(tensor) for optimizer in optimizers for tensor in _state(optimizer)]
    dtypes: Counter[str] = Counter()
    for tensor in state:
        dtypes[_dtype(tensor)] += tensor.numel()
    return {
        **description,
        "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in state),
        "state_dtypes": dict(dtypes),
        "state_devices": sorted({tensor.device.type for tensor in state}),
    }


def _parameters(optimizer: Any) -> list[Any]:
    masters = fp32_masters(optimizer)
    if masters is not None:
        return list(masters)
    return [p for group in torch_optimizers(optimizer)[0].param_groups for p in group["params"]]


def _state(optimizer: Any) -> list[Any]:
    # Copied in one step: another thread may add to its own state.
    states = [
        state for torch_optimizer in torch_optimizers(optimizer) for state in list(torch_optimizer.state.values())
    ]
    return [value for state in states for value in list(state.values()) if hasattr(value, "element_size")]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
