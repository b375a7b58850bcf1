"""Describes a DeepSpeed engine: its configuration, and the devices of its optimizer's state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..zero_optimizer import fp32_masters, offloads_state, subgroup_sizes
from .storage import largest_gradient_bytes

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


def describe_engine(engine: Any, recomputes: bool, moments_lost: bool | None = None) -> dict[str, Any]:
    """Return the `deepspeed` entry after a step. `moments_lost` by a loaded checkpoint; None if none was loaded."""
    optimizer = engine.optimizer
    sizes = subgroup_sizes(optimizer)
    description = {
        "version": getattr(sys.modules.get("deepspeed"), "__version__", None),
        "config": to_json_value(getattr(getattr(engine, "_config", None), "_param_dict", None)),
        "stage": int(engine.zero_optimization_stage()),
        "subgroup_params": [int(size) for size in sizes] if sizes is not None else None,
        "activation_checkpointing": _checkpointing(engine, recomputes),
        "moments_lost": moments_lost,
        "largest_stored_gradient_bytes": largest_gradient_bytes(optimizer),
    }
    masters = fp32_masters(optimizer)
    if masters is not None:
        gradients = [master.grad for master in masters if master.grad is not None]
        description.update(
            subgroup_devices=[master.device.type for master in masters],
            masters_pinned=_pinned(masters),
            gradients_pinned=_pinned(gradients) if offloads_state(optimizer) else None,
        )
    policy = getattr(optimizer, "ebbtide_policy", None)
    if policy is not None:
        description["policy"] = str(policy)
    return description


def to_json_value(value: Any, depth: int = 8) -> Any:
    """Convert a configuration to values of JSON; what JSON cannot represent becomes text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # NaN compares as False
    if depth and isinstance(value, Mapping):
        return {str(key): to_json_value(part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [to_json_value(part, depth - 1) for part in value]
    return str(value)


def _pinned(tensors: Iterable[Any]) -> bool | None:
    """Return whether all tensors in host memory are pinned; None if none is in host memory."""
    pinned = [bool(tensor.is_pinned()) for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
    return all(pinned) if pinned else None


def _checkpointing(engine: Any, recomputes: bool) -> bool | None:
    """Return whether activations are checkpointed; None if it cannot be determined. DeepSpeed's own checkpointing
    counts, Hugging Face's switch, and any recomputation that was seen to run."""
    configured = getattr(sys.modules.get(_CHECKPOINTING), "is_configured", None)
    if recomputes or (configured is not None and configured()):
        return True
    switches = [getattr(module, "gradient_checkpointing", None) for module in engine.module.modules()]
    settings = [switch for switch in switches if isinstance(switch, bool)]
    return any(settings) if settings else None
