"""Advances the clock by the operations of the job."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.dryrun import time_priors as priors
from ebbtide.profiler.dryrun.clock import VirtualClock
from ebbtide.profiler.dryrun.kernel_work import kernel_work
from ebbtide.profiler.dryrun.time_priors import PriorRange, WorkClass


class OperationTimer:
    """Charges each operation to the host, and its kernel to the current stream.

    Args:
        clock: The clock.
        modules: Names of the modules that run; in the backward they are recomputed by Python.
    """

    def __init__(self, clock: VirtualClock, modules: list[str]) -> None:
        self._clock, self._modules = clock, modules

    def run(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Advance by an operation that is no copy between host and device."""
        tensors = [*inputs, *outputs]
        if not any(tensor.device.type == "cuda" for tensor in tensors):
            self._run_on_host(func, tensors)
            return
        work = kernel_work(func, args, kwargs, result, inputs, outputs)
        if work is None:
            self._clock.run_host(priors.VIEW_NS)
            return
        self._clock.run_host(self._launch_cost(len(inputs) if work.work_class is WorkClass.FOREACH else 0))
        self._clock.run_kernel(work)

    def _launch_cost(self, list_tensors: int) -> PriorRange:
        in_engine = torch._C._current_graph_task_id() != -1 and not self._modules
        cost = priors.ENGINE_OPERATION_NS if in_engine else priors.PYTHON_OPERATION_NS
        if not list_tensors:
            return cost
        return PriorRange(*(own + list_tensors * each for own, each in zip(cost, priors.LIST_TENSOR_NS, strict=True)))

    def _run_on_host(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Advance by an operation on large tensors of the host, once the job trains: they are optimizer state then."""
        if self._clock.in_job and not func.is_view:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._clock.run_host(self._clock.rates.host_ns(size))
