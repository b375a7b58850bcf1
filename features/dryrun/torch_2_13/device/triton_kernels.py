"""Launches of Triton kernels: they need a device, so their work is counted by their
arguments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.features.dryrun.torch_2_13.operations.kernel_work import tensor_bytes
from ebbtide.features.dryrun.torch_2_13.operations.shadow_values import (
    ShadowValues,
    tensors_in,
)
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass
from ebbtide.profiler.agent.patches import Patches


class TritonKernels:
    """Takes the launch of a kernel as an operation that reads or writes each argument
    once.

    What a kernel writes is not known, nor are its floating-point operations.

    `counts`: launches by the name of the kernel."""

    def __init__(self, clock: VirtualClock, values: ShadowValues) -> None:
        self.counts: Counter[str] = Counter()
        self._clock, self._values = clock, values

    def install(self, patches: Patches) -> None:
        """Replace Triton's functions until `patches.undo()`, once the job imports
        it."""

        def patch_module(module: Any) -> None:
            for name in ("JITFunction", "Autotuner", "Heuristics"):
                kind = getattr(module, name, None)
                if kind is not None and kind.__module__ == module.__name__:
                    self._patch(kind, patches)

        for name in ("triton.runtime.jit", "triton.runtime.autotuner"):
            patches.when_imported(name, patch_module)

    def _patch(self, kind: Any, patches: Patches) -> None:
        original = kind.run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            tensors = [*tensors_in(args), *tensors_in(options.values())]
            if not any(tensor.device.type == "cuda" for tensor in tensors):
                return original(kernel, *args, **options)
            return self._launch(_name(kernel), tensors)

        patches.set(kind, "run", run)

    def _launch(self, name: str, tensors: list[torch.Tensor]) -> None:
        self.counts[name] += 1
        self._values.forget(tensors)
        size = sum(tensor_bytes(tensor) for tensor in tensors)
        self._clock.run_host(priors.PYTHON_OPERATION_NS)
        self._clock.run_kernel(
            KernelWork(name, "compute", WorkClass.ELEMENTWISE, 0, size)
        )


def _name(kernel: Any) -> str:
    """Return the name of the function below tuning and heuristics."""
    while hasattr(kernel, "fn") and not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", "kernel"))
