"""Finds the framework that trains, and the samples of its micro-step. Reads loaded modules and objects only."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# Name, a module that is loaded only where the framework trains, and the package with its version. Those that build on
# others come first. DeepSpeed is loaded by others too: the trace's entry `deepspeed` tells whether it trains.
_FRAMEWORKS = (
    ("llamafactory", "llamafactory.train", "llamafactory"),
    ("axolotl", "axolotl.core.trainers", "axolotl"),
    ("trl", "trl.trainer.base_trainer", "trl"),
    ("trl", "trl.trainer.sft_trainer", "trl"),
    ("torchtune", "torchtune.training", "torchtune"),
    ("lightning", "lightning.pytorch.trainer", "lightning"),
    ("lightning", "pytorch_lightning.trainer", "pytorch_lightning"),
    ("transformers", "transformers.trainer", "transformers"),
)
_TRAINING_ARGUMENTS = "transformers.training_args"


def describe_framework(modules: Iterable[Any], batch: int | None) -> dict[str, Any]:
    """Return the entry `framework`: name, version, samples of a micro-step; `batch`: those of the model's input."""
    for name, module, package in _FRAMEWORKS:
        if module in sys.modules:
            version = getattr(sys.modules.get(package), "__version__", None)
            return {"name": name, "version": version, "micro_batch": _stated_batch() or batch}
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    is_sharded = sharded is not None and any(isinstance(module, sharded) for module in modules)
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return {"name": "fsdp2" if is_sharded else "torch", "version": version and str(version), "micro_batch": batch}


def first_dimension(value: Any, tensor: type, depth: int = 4) -> int | None:
    """Return the first dimension of the first tensor in the arguments of a model; None if there is none."""
    if isinstance(value, tensor):
        shape = value.shape  # type: ignore[attr-defined]
        return int(shape[0]) if len(shape) else None
    parts: Any = list(value.values()) if isinstance(value, Mapping) else value
    if not depth or not isinstance(parts, (list, tuple)):
        return None
    sizes = (first_dimension(part, tensor, depth - 1) for part in parts[:64])
    return next((size for size in sizes if size is not None), None)


def _stated_batch() -> int | None:
    """Return the micro-batch of the arguments of transformers' Trainer, which those of others inherit.

    A preference trainer joins two samples in one input of its model, and a packed one has a single row.
    """
    base = getattr(sys.modules.get(_TRAINING_ARGUMENTS), "TrainingArguments", None)
    if base is None:
        return None
    arguments = next((one for one in gc.get_objects() if base in type(one).__mro__), None)
    size = getattr(arguments, "per_device_train_batch_size", None)
    return size if isinstance(size, int) and size > 0 else None
