"""Reads the state of DeepSpeed's optimizers and engines, across ZeRO's stages and
DeepSpeed's versions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ebbtide.profiler.agent.framework_objects import FrameworkReader

# Attributes of stage 3, of ebbtide's own optimizer, and of stages 1 and 2: one entry
# per subgroup.
_MASTERS = (
    "fp32_partitioned_groups_flat",
    "_masters",
    "single_partition_of_fp32_groups",
)
_SIZES = ("fp16_partitioned_groups_flat_numel", "partition_size")
# Those with gradients, across the stages.
_GRADIENTS = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "temp_grad_buffer_for_cpu_offload",
)
_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


def is_deepspeed_object(value: Any) -> bool:
    """Return whether an object is an instance of a DeepSpeed class or its subclass."""
    return any(
        str(kind.__module__).startswith("deepspeed.") for kind in type(value).__mro__
    )


def fp32_masters(optimizer: Any) -> Any:
    """Return the flat fp32 parameters of each subgroup that this rank updates.

    Return None if it is not a ZeRO optimizer.
    """
    return _first_attribute(optimizer, _MASTERS)


def subgroup_sizes(optimizer: Any) -> Any:
    """Return this rank's parameters in each subgroup, with padding.

    Return None if it is not a ZeRO optimizer.
    """
    return (
        _first_attribute(optimizer, _SIZES)
        if fp32_masters(optimizer) is not None
        else None
    )


class ZeroReader(FrameworkReader):
    """Reads DeepSpeed's optimizers, engines and parameters."""

    def inner_optimizers(self, optimizer: Any) -> list[Any] | None:
        """Return the torch optimizers in DeepSpeed's: in partial offload two."""
        if (
            not is_deepspeed_object(optimizer)
            or getattr(optimizer, "optimizer", None) is None
        ):
            return None
        candidates = [optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)]
        return [candidate for candidate in candidates if candidate is not None]

    def masters(self, optimizer: Any) -> Any:
        """Return the flat fp32 parameters of each subgroup that this rank updates."""
        return fp32_masters(optimizer)

    def subgroup_sizes(self, optimizer: Any) -> Any:
        """Return this rank's parameters in each subgroup, with padding."""
        return subgroup_sizes(optimizer)

    def state_device(self, optimizer: Any) -> str | None:
        """Return `nvme` if state is swapped, `cpu` if another process has it.

        The process is one that updates on the CPU.
        """
        if swaps_to_disk(optimizer):
            return "nvme"
        return "cpu" if has_state_in_other_process(optimizer) else None

    def gradients(self, optimizer: Any) -> list[Any] | None:
        """Return the buffers of gradients."""
        if not is_deepspeed_object(optimizer):
            return None
        return [getattr(optimizer, attribute, None) for attribute in _GRADIENTS]

    def content(self, module: Any) -> Any:
        """Return the model in an engine."""
        return module._modules.get("module") if is_deepspeed_object(module) else None

    def local_tensor(self, parameter: Any) -> Any:
        """Return ZeRO-3's partition."""
        return getattr(parameter, "ds_tensor", None)

    def total_elements(self, parameter: Any) -> Any:
        """Return the elements of a parameter that ZeRO-3 divides."""
        return getattr(parameter, "ds_numel", None)

    def describe(self, engine: Any, recomputes: bool) -> dict[str, Any] | None:
        """Return the section `deepspeed` on an engine after a step."""
        return (
            describe_engine(engine, recomputes) if is_deepspeed_object(engine) else None
        )


def swaps_to_disk(optimizer: Any) -> bool:
    """Return whether the optimizer's state is on a disk."""
    return bool(getattr(optimizer, "swap_optimizer", False))


def has_state_in_other_process(optimizer: Any) -> bool:
    """Return whether the moments are in another process: SuperOffload's worker, or
    ZenFlow's optimizer process."""
    attributes = getattr(optimizer, "__dict__", {})
    return "superoffload_cpu_optimizer" in attributes or bool(
        attributes.get("process_optimizer_established")
    )


def offloads_state(optimizer: Any) -> bool:
    """Return whether some of the optimizer's state is outside of the accelerator."""
    return bool(
        getattr(optimizer, "offload_optimizer", False)
        or getattr(optimizer, "cpu_offload", False)
    )


def compute_resource(tensor: Any) -> str:
    """Return the resource that computes on a tensor: "cpu" or "gpu"."""
    return "cpu" if tensor.device.type == "cpu" else "gpu"


def _first_attribute(owner: Any, names: tuple[str, ...]) -> Any:
    """Return the first of the attributes in the object's own `__dict__`.

    Reading a property may have effects.
    """
    attributes = getattr(owner, "__dict__", {})
    return next((attributes[name] for name in names if name in attributes), None)


def largest_gradient_bytes(optimizer: Any) -> int | None:
    """Return the bytes of the largest piece of a gradient that is swapped to storage;
    None if there is none."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    infos = getattr(swapper, "swap_params_info", {}).values()
    lengths = [
        int(gradient.length)
        for info in infos
        for gradient in info.swapped_gradients.values()
    ]
    return (
        max(lengths) * int(swapper.swap_element_size)
        if swapper is not None and lengths
        else None
    )


def has_lost_moments(engine: Any) -> bool:
    """Return whether an engine has no moments of a swapped subgroup.

    The engine has loaded a checkpoint of trained steps. DeepSpeed copies the files of
    the moments, but a new process does not know of them: it begins with zeros.
    """
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    infos = getattr(swapper, "swap_params_info", {}).values()
    return int(engine.global_steps) > 0 and any(
        not info.has_state_tensors for info in infos
    )


def describe_engine(
    engine: Any, recomputes: bool, moments_lost: bool | None = None
) -> dict[str, Any]:
    """Return the `deepspeed` entry after a step. `moments_lost` by a loaded checkpoint;
    None if none was loaded."""
    optimizer = engine.optimizer
    sizes = subgroup_sizes(optimizer)
    description = {
        "version": getattr(sys.modules.get("deepspeed"), "__version__", None),
        "config": to_json_value(
            getattr(getattr(engine, "_config", None), "_param_dict", None)
        ),
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
    """Convert a configuration to values of JSON.

    What JSON cannot represent becomes text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # NaN compares as False
        return value if abs(value) < float("inf") else str(value)
    if depth and isinstance(value, Mapping):
        return {str(key): to_json_value(part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [to_json_value(part, depth - 1) for part in value]
    return str(value)


def _pinned(tensors: Iterable[Any]) -> bool | None:
    """Return whether all tensors in host memory are pinned.

    Return None if none is in host memory.
    """
    pinned = [
        bool(tensor.is_pinned())
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.numel()
    ]
    return all(pinned) if pinned else None


def _checkpointing(engine: Any, recomputes: bool) -> bool | None:
    """Return whether activations are checkpointed; None if it cannot be determined.
    DeepSpeed's own checkpointing counts, Hugging Face's switch, and any recomputation
    that was seen to run."""
    configured = getattr(sys.modules.get(_CHECKPOINTING), "is_configured", None)
    if recomputes or (configured is not None and configured()):
        return True
    switches = [
        getattr(module, "gradient_checkpointing", None)
        for module in engine.module.modules()
    ]
    settings = [switch for switch in switches if isinstance(switch, bool)]
    return any(settings) if settings else None
