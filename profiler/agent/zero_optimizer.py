"""What a DeepSpeed optimizer holds, across ZeRO's stages and DeepSpeed's versions. Nothing here raises."""

from __future__ import annotations

from typing import Any

# Of stage 3, of ebbtide's own, and of stages 1 and 2: one entry per subgroup.
_MASTERS = ("fp32_partitioned_groups_flat", "_masters", "single_partition_of_fp32_groups")
_SIZES = ("fp16_partitioned_groups_flat_numel", "partition_size")


def of_deepspeed(thing: Any) -> bool:
    """Whether an object is of one of DeepSpeed's classes, or of one made from it."""
    return any(str(kind.__module__).startswith("deepspeed.") for kind in type(thing).__mro__)


def masters(optimizer: Any) -> Any:
    """The fp32 parameters of each subgroup that this rank updates, flat; None for what is no ZeRO optimizer."""
    return _first(optimizer, _MASTERS)


def sizes(optimizer: Any) -> Any:
    """This rank's parameters of each subgroup, padding included."""
    return _first(optimizer, _SIZES) if masters(optimizer) is not None else None


def inner(optimizer: Any) -> list[Any]:
    """The torch optimizers that hold an optimizer's state: DeepSpeed's hold others, in partial offload two."""
    if not of_deepspeed(optimizer) or getattr(optimizer, "optimizer", None) is None:
        return [optimizer]
    found = [optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)]
    return [held for held in found if held is not None]


def swaps(optimizer: Any) -> bool:
    """Whether the optimizer's state lies on a disk."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def offloads(optimizer: Any) -> bool:
    """Whether the optimizer's state lies outside of the accelerator, in part at least."""
    return bool(getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False))


def here(parameter: Any) -> Any:
    """The tensor of a model's parameter that lies on this rank: ZeRO-3's partition, or DTensor's local part."""
    partition = getattr(parameter, "ds_tensor", None)
    return partition if partition is not None else getattr(parameter, "_local_tensor", parameter)


def whole(parameter: Any) -> int:
    """The elements of a model's parameter over all ranks."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def place(tensor: Any) -> str:
    """The resource that computes on a tensor."""
    return "cpu" if tensor.device.type == "cpu" else "gpu"


def _first(thing: Any, names: tuple[str, ...]) -> Any:
    """The first that an object holds itself: a property of it may do things when it is read."""
    held = getattr(thing, "__dict__", {})
    return next((held[name] for name in names if name in held), None)
