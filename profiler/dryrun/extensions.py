"""Refuses the compilation of CUDA extensions, and answers calls of NVML, for which there is no device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ebbtide.profiler.agent.imports import when_imported
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.errors import CannotFakeError

_CUDA_SOURCES = (".cu", ".cuh")


def patch_extensions(patches: Patches) -> Callable[[], None]:
    """Replace the functions until `patches.undo()`, in modules that are imported until the returned one is called."""
    cancels = [
        when_imported("torch.utils.cpp_extension", lambda module: _refuse_compilation(module, patches)),
        when_imported("pynvml", lambda module: _answer_nvml(module, patches)),
    ]

    def cancel() -> None:
        for function in cancels:
            function()

    return cancel


def _refuse_compilation(module: Any, patches: Patches) -> None:
    load, load_inline = module.load, module.load_inline

    def refuse(function: str, name: Any) -> None:
        raise CannotFakeError(
            f"cannot dry-run torch.utils.cpp_extension.{function}({name!r}): a CUDA extension runs on a device only; "
            "make the job use operations of torch for the dry run, or an extension that is registered with "
            "torch.library.register_fake"
        )

    def load_other(name: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(file).endswith(_CUDA_SOURCES) for file in files):
            refuse("load", name)
        return load(name, sources, *args, **kwargs)

    def load_inline_other(name: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources") or (len(args) > 1 and args[1]):
            refuse("load_inline", name)
        return load_inline(name, *args, **kwargs)

    patches.set(module, "load", load_other)
    patches.set(module, "load_inline", load_inline_other)


def _answer_nvml(module: Any, patches: Patches) -> None:
    """Let jobs that print the use of the device find one, which does nothing."""

    def memory(*_args: Any, **_kwargs: Any) -> Any:
        free, total = torch.cuda.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free)

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetHandleByUUID": 0,
        "nvmlDeviceGetName": torch.cuda.get_device_name(),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": 0,
        "nvmlDeviceGetPowerUsage": 0,
        "nvmlDeviceGetEnforcedPowerLimit": 0,
        "nvmlDeviceGetTotalEnergyConsumption": 0,
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlSystemGetDriverVersion": "dry run",
    }
    for name, value in answers.items():
        patches.set(module, name, _constant(value))
    patches.set(module, "nvmlDeviceGetMemoryInfo", memory)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value
