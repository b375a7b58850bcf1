"""Reads the state of DeepSpeed's optimizers, across ZeRO's stages and DeepSpeed's versions. Nothing here raises."""

from __future__ import annotations

from typing import Any

# Attributes of stage 3, of ebbtide's own optimizer, and of stages 1 and 2: one entry per subgroup.
_MASTERS = ("fp32_partitioned_groups_flat", "_masters", "single_partition_of_fp32_groups")
_SIZES = ("fp16_partitioned_groups_flat_numel", "partition_size")


def is_deepspeed_object(value: Any) -> bool:
    """Return whether an object is an instance of a class of DeepSpeed, or of a subclass of one."""
    return any(str(kind.__module__).startswith("deepspeed.") for kind in type(value).__mro__)


def fp32_masters(optimizer: Any) -> Any:
    """Return the flat fp32 parameters of each subgroup that this rank updates; None if it is not a ZeRO optimizer."""
    return _first_attribute(optimizer, _MASTERS)


def subgroup_sizes(optimizer: Any) -> Any:
    """Return this rank's parameters in each subgroup, with padding; None if it is not a ZeRO optimizer."""
    return _first_attribute(optimizer, _SIZES) if fp32_masters(optimizer) is not None else None


def torch_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers with the state: DeepSpeed's contain others, in partial offload two."""
    if not is_deepspeed_object(optimizer) or getattr(optimizer, "optimizer", None) is None:
        return [optimizer]
    candidates = [optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)]
    return [candidate for candidate in candidates if candidate is not None]


def swaps_to_disk(optimizer: Any) -> bool:
    """Return whether the optimizer's state is on a disk."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def has_state_in_other_process(optimizer: Any) -> bool:
    """Return whether the moments are in another process: SuperOffload's worker, or ZenFlow's optimizer process."""
    attributes = getattr(optimizer, "__dict__", {})
    return "superoffload_cpu_optimizer" in attributes or bool(attributes.get("process_optimizer_established"))


def offloads_state(optimizer: Any) -> bool:
    """Return whether at least a part of the optimizer's state is outside of the accelerator."""
    return bool(getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False))


def local_tensor(parameter: Any) -> Any:
    """Return this rank's part of a model's parameter: ZeRO-3's partition, or the local tensor of a DTensor."""
    partition = getattr(parameter, "ds_tensor", None)
    return partition if partition is not None else getattr(parameter, "_local_tensor", parameter)


def total_elements(parameter: Any) -> int:
    """Return the number of elements of a model's parameter over all ranks."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def compute_resource(tensor: Any) -> str:
    """Return the resource that computes on a tensor: "cpu" or "gpu"."""
    return "cpu" if tensor.device.type == "cpu" else "gpu"


def _first_attribute(owner: Any, names: tuple[str, ...]) -> Any:
    """Return the first of the attributes in the object's own `__dict__`, since reading a property may have effects."""
    attributes = getattr(owner, "__dict__", {})
    return next((attributes[name] for name in names if name in attributes), None)
