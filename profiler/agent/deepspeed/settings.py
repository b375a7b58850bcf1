"""What a DeepSpeed engine was configured to do, and where its optimizer's state came to lie."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..zero_optimizer import masters, offloads, sizes

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


def facts(engine: Any, recomputes: bool) -> dict[str, Any]:
    """The trace's `deepspeed`, as JSON can hold it. recomputes: modules were seen to run inside a backward."""
    optimizer = engine.optimizer
    subgroups = sizes(optimizer)
    found = {
        "version": getattr(sys.modules.get("deepspeed"), "__version__", None),
        "config": plain(getattr(getattr(engine, "_config", None), "_param_dict", None)),
        "stage": int(engine.zero_optimization_stage()),
        "subgroup_params": [int(size) for size in subgroups] if subgroups is not None else None,
        "activation_checkpointing": _checkpointing(engine, recomputes),
    }
    flat = masters(optimizer)
    if flat is not None:
        gradients = [master.grad for master in flat if master.grad is not None]
        found.update(
            subgroup_devices=[master.device.type for master in flat],
            masters_pinned=_pinned(flat),
            gradients_pinned=_pinned(gradients) if offloads(optimizer) else None,
        )
    policy = getattr(optimizer, "ebbtide_policy", None)
    if policy is not None:
        found["policy"] = str(policy)
    return found


def plain(value: Any, depth: int = 8) -> Any:
    """A configuration as JSON: what JSON does not know becomes text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)  # NaN compares as False
    if depth and isinstance(value, Mapping):
        return {str(key): plain(part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(part, depth - 1) for part in value]
    return str(value)


def _pinned(tensors: Iterable[Any]) -> bool | None:
    """Whether those on the host lie in pinned memory; None where there are none."""
    pinned = [bool(tensor.is_pinned()) for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
    return all(pinned) if pinned else None


def _checkpointing(engine: Any, recomputes: bool) -> bool | None:
    """DeepSpeed's own, Hugging Face's switch, or any that was seen to run; None: nothing tells."""
    configured = getattr(sys.modules.get(_CHECKPOINTING), "is_configured", None)
    if recomputes or (configured is not None and configured()):
        return True
    switches = [getattr(module, "gradient_checkpointing", None) for module in engine.module.modules()]
    known = [switch for switch in switches if isinstance(switch, bool)]
    return any(known) if known else None
