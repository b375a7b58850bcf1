"""Facts about the job as a whole: the host, rank, devices and framework, and the model
and optimizers at its first update."""

from __future__ import annotations

import _thread
import gc
import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from .framework_objects import (
    content,
    fp32_masters,
    local_tensor,
    own_state,
    state_device,
    subgroup_sizes,
    torch_optimizers,
    total_elements,
)
from .spool import within_limit


class JobInfo:
    """The file `facts-NAME.json` beside the spool of this name, replaced as a whole at
    each change. Never raises."""

    def __init__(self, torch: Any, directory: str) -> None:
        self._torch = torch
        self.directory = directory
        self._name: str | None = None
        self._data: dict[str, Any] = {"notes": []}
        self.host = socket.gethostname()
        self._changed = False
        self._writing = _thread.allocate_lock()
        self._described: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def read_ranks(self) -> tuple[int, int, int]:
        """Return (rank, world size, local rank) from torch.distributed if it runs, else
        from the environment."""
        rank, world_size = (
            _environment_number("RANK", 0),
            _environment_number("WORLD_SIZE", 1),
        )
        distributed = getattr(self._torch, "distributed", None)
        if (
            distributed is not None
            and distributed.is_available()
            and distributed.is_initialized()
        ):
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        return rank, world_size, _environment_number("LOCAL_RANK", 0)

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The devices of the process, as of its first phase or its first update.

        There are none where it uses no GPU.
        """
        return list(self._data.get("devices", ()))

    def begin(self, name: str) -> None:
        """Describe the process, at its first phase. `name` is the name of the spool
        that this belongs to."""
        self._name = name
        rank, world_size, local_rank = self.read_ranks()
        torch = self._torch
        self._data.update(
            pid=os.getpid(),
            host=self.host,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            launch=_launch(),
            argv=list(sys.argv),
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            threads={
                "torch": torch.get_num_threads(),
                "omp": os.environ.get("OMP_NUM_THREADS"),
            },
            devices=self._devices(),
        )
        self.write()

    def add_training(
        self,
        modules: Iterable[Any],
        optimizers: Iterable[Any],
        recomputes: bool,
        batch: dict[str, Any],
    ) -> None:
        """Describe the model and the optimizers of an update that has ended, if an
        optimizer is new.

        Optimizer state exists only after the first step, so an optimizer that has
        skipped its step waits for the next."""
        new = [
            o
            for o in optimizers
            if not self._described.get(o)
            and hasattr(o, "param_groups")
            and not getattr(o, "overflow", False)
        ]
        if not new:
            return
        try:
            for optimizer in new:
                self._described[optimizer] = True
            self._data["devices"] = self._devices()
            described = list(self._described)
            modules = list(modules)
            self._data["model"] = describe_model(modules, described, recomputes)
            self._data["framework"] = describe_framework(modules, batch)
            self._data["optimizers"] = describe_optimizers(described)
        except Exception as error:
            self.note(f"the model and its optimizers could not be described: {error!r}")
        self.write()

    def set(self, key: str, value: Any) -> None:
        """Store one more value, which JSON must be able to represent."""
        self._data[key] = value
        self.write()

    def path(self, name: str) -> str:
        """Return the path of a further file of this process, after `begin`."""
        return os.path.join(self.directory, f"{self._name}-{name}")

    def note(self, text: str) -> None:
        self._data["notes"].append(text)
        self.write()

    def write(self) -> None:
        """Replace the file; do nothing before `begin`. Where another thread is at it,
        that one writes again."""
        self._changed = self._name is not None
        while self._changed and self._writing.acquire(False):
            self._changed = False
            try:
                self._replace_file()
            finally:
                self._writing.release()

    def _replace_file(self) -> None:
        path = os.path.join(self.directory, f"facts-{self._name}.json")
        try:
            text = json.dumps(self._data)
            if not within_limit(len(text)):
                return
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(path + ".new", path)
        except (OSError, ValueError, TypeError, RuntimeError):
            # for example a full disk: the spool's header has all that the trace
            # requires
            pass

    def _devices(self) -> list[dict[str, Any]]:
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return []
        index = cuda.current_device()
        properties = cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        device = {
            "device": f"cuda:{index}",
            "kind": "cuda",
            "name": properties.name,
            "uuid": uuid and f"GPU-{uuid}",
        }
        return [{**device, "capacity_bytes": properties.total_memory}]


def _launch() -> str:
    """Return text that is the same in all processes of one distributed job, and differs
    between jobs."""
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    )
    return " ".join(os.environ.get(name, "-") for name in names)


def _environment_number(variable: str, default: int) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default


def describe_model(
    modules: list[Any], optimizers: list[Any], recomputes: bool
) -> dict[str, Any]:
    """Return the trace's `model` entry, on the outermost modules, which together are
    the model.

    Its `params` counts the parameters whose optimizer state is on this rank.
    `recomputes`: whether modules were called in the backward."""
    modules = [
        module if (inner := content(module)) is None else inner for module in modules
    ]
    parameters = list(
        {id(p): p for module in modules for p in module.parameters()}.values()
    )
    tensors = [local_tensor(p) for p in parameters]
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[_dtype(tensor)] += tensor.numel()
    partitions = [
        sizes for sizes in map(subgroup_sizes, optimizers) if sizes is not None
    ]
    return {
        # A loss is a module too; one without parameters is not a model.
        "classes": sorted(
            {type(m).__name__ for m in modules if any(True for _ in m.parameters())}
        ),
        "params": sum(map(sum, partitions)) if partitions else sum(dtypes.values()),
        "total_params": sum(map(total_elements, parameters)),
        "trainable_params": sum(
            t.numel() for p, t in zip(parameters, tensors) if p.requires_grad
        ),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "dtypes": dict(dtypes),
        "checkpointing": recomputes,
    }


def describe_optimizers(optimizers: list[Any]) -> list[dict[str, Any]]:
    """Describe the optimizers, with one entry per class.

    A job that steps in the backward has one optimizer per parameter.
    """
    by_class: dict[str, list[Any]] = {}
    for optimizer in optimizers:
        by_class.setdefault(type(torch_optimizers(optimizer)[0]).__name__, []).append(
            optimizer
        )
    return [
        {"class": name, **_describe_class(same_class)}
        for name, same_class in by_class.items()
    ]


def _describe_class(optimizers: list[Any]) -> dict[str, Any]:
    groups = [
        group
        for optimizer in optimizers
        for group in torch_optimizers(optimizer)[0].param_groups
    ]
    parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
    description = {
        "count": len(optimizers),
        "ebbtide": any(hasattr(optimizer, "ebbtide_state") for optimizer in optimizers),
        "groups": len(groups),
        "params": sum(
            sum(subgroup_sizes(o) or [local_tensor(p).numel() for p in _parameters(o)])
            for o in optimizers
        ),
        "param_dtypes": sorted({_dtype(p) for p in parameters}),
    }
    elsewhere = {
        device for device in map(state_device, optimizers) if device is not None
    }
    if elsewhere:
        return {
            **description,
            "state_devices": ["nvme" if "nvme" in elsewhere else "cpu"],
        }
    state = [
        (name, local_tensor(tensor))
        for optimizer in optimizers
        for name, tensor in _state(optimizer)
    ]
    dtypes: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, tensor in state:
        dtypes[_dtype(tensor)] += tensor.numel()
        names[str(name)] += tensor.numel()
    # Torch keeps step counts, scalars, on the CPU beside state on the GPU.
    scalars = {tensor.device.type for _, tensor in state}
    devices = {tensor.device.type for _, tensor in state if tensor.dim()} or scalars
    return {
        **description,
        "state_bytes": sum(
            tensor.numel() * tensor.element_size() for _, tensor in state
        ),
        "state_dtypes": dict(dtypes),
        "state_names": dict(names),
        # State of ebbtide's in a file has no memory.
        "state_devices": sorted(
            "nvme" if device == "meta" else device for device in devices
        ),
    }


def _parameters(optimizer: Any) -> list[Any]:
    masters = fp32_masters(optimizer)
    if masters is not None:
        return list(masters)
    first = torch_optimizers(optimizer)[0]
    # Frozen ones, which some jobs of LoRA pass too, have no state.
    return [
        p
        for group in first.param_groups
        for p in group["params"]
        if p.requires_grad or p in own_state(first)
    ]


def _state(optimizer: Any) -> list[Any]:
    """Return (name, tensor) of the state.

    The state of ebbtide's optimizers includes their masters.
    """
    own = getattr(optimizer, "ebbtide_state", None)
    if own is not None:
        return list(own)
    # Copied in one step: another thread may add to its own state.
    states = [
        state
        for torch_optimizer in torch_optimizers(optimizer)
        for state in list(torch_optimizer.state.values())
    ]
    return [
        item
        for state in states
        for item in list(state.items())
        if hasattr(item[1], "element_size")
    ]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


# Name, a module that is loaded only where the framework trains, and the package with
# its version. Those that build on others come first. DeepSpeed is loaded by others too:
# the trace's entry `deepspeed` tells whether it trains.
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


def describe_framework(modules: Iterable[Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `framework` of the metadata: name, version, and the samples and
    tokens of a micro-step, as `batch_of` returns them."""
    for name, module, package in _FRAMEWORKS:
        if module in sys.modules:
            version = getattr(sys.modules.get(package), "__version__", None)
            return {"name": name, "version": version, **batch, **_stated_batch()}
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    is_sharded = sharded is not None and any(
        isinstance(module, sharded) for module in modules
    )
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return {
        "name": "fsdp2" if is_sharded else "torch",
        "version": version and str(version),
        **batch,
    }


def batch_of(value: Any, tensor: type, depth: int = 4) -> dict[str, Any]:
    """Return the samples and tokens of a model's first tensor argument.

    The tokens are given if it is a matrix of integers; the result is empty if there is
    no tensor.
    """
    if isinstance(value, tensor):
        shape, dtype = value.shape, value.dtype  # type: ignore[attr-defined]
        tokens = (
            {"tokens": int(shape[0] * shape[1])}
            if len(shape) == 2 and "int" in str(dtype)
            else {}
        )
        return {"micro_batch": int(shape[0]), **tokens} if len(shape) else {}
    parts: Any = list(value.values()) if isinstance(value, Mapping) else value
    if not depth or not isinstance(parts, (list, tuple)):
        return {}
    batches = (batch_of(part, tensor, depth - 1) for part in parts[:64])
    return next(filter(None, batches), {})


def _stated_batch() -> dict[str, Any]:
    """Return the micro-batch in the arguments of transformers' Trainer.

    Trainers of other packages inherit these arguments. A preference trainer joins two
    samples in one input of its model, and a packed one has a single row.
    """
    base = getattr(sys.modules.get(_TRAINING_ARGUMENTS), "TrainingArguments", None)
    if base is None:
        return {}
    arguments = next(
        (one for one in gc.get_objects() if base in type(one).__mro__), None
    )
    size = getattr(arguments, "per_device_train_batch_size", None)
    return {"micro_batch": size} if isinstance(size, int) and size > 0 else {}
