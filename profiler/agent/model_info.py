"""A model and its optimizers in figures: what of them lies on this rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .zero_optimizer import here, inner, masters, of_deepspeed, sizes, swaps, whole


def describe_model(modules: list[Any], optimizers: list[Any]) -> dict[str, Any]:
    """The outermost modules together. params: those whose state this rank holds."""
    modules = [m.module if of_deepspeed(m) and hasattr(m, "module") else m for m in modules]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    tensors = [here(p) for p in parameters]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[_dtype(tensor)] += tensor.numel()
    partitions = [held for held in map(sizes, optimizers) if held is not None]
    return {
        # A loss is a module too; one without parameters is no model.
        "classes": sorted({type(m).__name__ for m in modules if any(True for _ in m.parameters())}),
        "params": sum(map(sum, partitions)) if partitions else sum(dtypes.values()),
        "total_params": sum(map(whole, parameters)),
        "trainable_params": sum(t.numel() for p, t in zip(parameters, tensors) if p.requires_grad),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "dtypes": dict(dtypes),
    }


def describe_optimizers(found: list[Any]) -> list[dict[str, Any]]:
    """One entry per class: with the optimizer in the backward there is one object per parameter."""
    by_class: dict[str, list[Any]] = {}
    for optimizer in found:
        by_class.setdefault(type(inner(optimizer)[0]).__name__, []).append(optimizer)
    return [{"class": name, **_described(group)} for name, group in by_class.items()]


def _described(found: list[Any]) -> dict[str, Any]:
    groups = [group for optimizer in found for group in inner(optimizer)[0].param_groups]
    parameters = [p for optimizer in found for p in _parameters(optimizer)]
    described = {
        "count": len(found),
        "groups": len(groups),
        "params": sum(sum(sizes(o) or [here(p).numel() for p in _parameters(o)]) for o in found),
        "param_dtypes": sorted({_dtype(p) for p in parameters}),
    }
    if any(map(swaps, found)):
        return {**described, "state_devices": ["nvme"]}
    state = [here(tensor) for optimizer in found for tensor in _state(optimizer)]
    dtypes: Counter[str] = Counter()
    for tensor in state:
        dtypes[_dtype(tensor)] += tensor.numel()
    return {
        **described,
        "state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in state),
        "state_dtypes": dict(dtypes),
        "state_devices": sorted({tensor.device.type for tensor in state}),
    }


def _parameters(optimizer: Any) -> list[Any]:
    flat = masters(optimizer)
    if flat is not None:
        return list(flat)
    return [p for group in inner(optimizer)[0].param_groups for p in group["params"]]


def _state(optimizer: Any) -> list[Any]:
    held = [state for torchs in inner(optimizer) for state in torchs.state.values()]
    return [value for state in held for value in state.values() if hasattr(value, "element_size")]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
