"""AdamW with an fp32 master, its state wherever a policy puts it, to the same bits under every policy."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide.interleave.engine.device import Device
from ebbtide.interleave.engine.emulated import EmulatedDevice
from ebbtide.interleave.engine.engine import Engine, local
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.kernels import CpuKernel
from ebbtide.interleave.engine.layout import divide
from ebbtide.interleave.engine.reference import Hyper, Scalars
from ebbtide.interleave.engine.store import MASTER, Inputs
from ebbtide.interleave.machine import Machine
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.schedule import Schedule
from ebbtide.interleave.workload import FreeLine, Workload

_SUBGROUP_PARAMS = 100_000_000


class InterleavedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """torch.optim.AdamW for parameters whose state does not fit on the device.

    policy: as `ebbtide replay` takes it. machine: what the policy plans with. subgroup_params: how much state moves as
    one. memory_budget: bytes of device memory for state. max_grad_norm: clip the norm of all gradients to this.
    device: where the parameters are; without it, what they say: an emulated device for parameters on the CPU.
    threads: of the CPU's updates.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        policy: str = "adaptive",
        machine: Machine | None = None,
        subgroup_params: int = _SUBGROUP_PARAMS,
        memory_budget: float | None = None,
        max_grad_norm: float | None = None,
        device: Device | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.policy = policy
        self._machine = machine or Machine(name="unknown")
        self._subgroup_params = subgroup_params
        self._budget: FreeLine | None = None if memory_budget is None else ((0.0, float(memory_budget)),)
        self._max_grad_norm = max_grad_norm
        self._params = [param for group in self.param_groups for param in group["params"]]
        self._steps = [0] * len(self._params)
        kernel = CpuKernel(threads)
        subgroups = divide([local(param) for param in self._params], subgroup_params)
        self._engine = Engine(subgroups, device or EmulatedDevice(memory_budget), kernel)
        self._close = weakref.finalize(self, _close, self._engine, kernel)
        self._master_from_params()
        self._plan()

    @property
    def last_schedule(self) -> Schedule | None:
        """What the last step was measured to do."""
        return self._engine.last

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise EngineError("step() takes no closure: call loss.backward() before it")
        gradients = [None if param.grad is None else local(param.grad).detach().reshape(-1) for param in self._params]
        scale = self._scale(gradients)
        inputs = Inputs([local(param).detach().view(-1) for param in self._params], gradients)
        for index, hyper in enumerate(self._hypers()):
            inputs.scalars.append(self._scalars(index, hyper, gradients[index], scale))
        self._engine.step(inputs)
        for index, gradient in enumerate(gradients):
            self._steps[index] += gradient is not None

    def close(self) -> None:
        """End threads and give memory back; it cannot step afterwards."""
        self._close()

    def _hypers(self) -> Iterable[Hyper]:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            hyper = Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            for _ in group["params"]:
                yield hyper

    def _scalars(self, index: int, hyper: Hyper, gradient: torch.Tensor | None, scale: float) -> Scalars | None:
        return None if gradient is None else hyper.scalars(self._steps[index] + 1, scale)

    def _scale(self, gradients: list[torch.Tensor | None]) -> float:
        there = [gradient for gradient in gradients if gradient is not None]
        total = math.fsum(self._engine.device.sum_of_squares(there))
        if not math.isfinite(total):
            raise EngineError("a gradient is infinite or not a number: the step is left out, nothing was changed")
        if self._max_grad_norm is None:
            return 1.0
        return min(1.0, self._max_grad_norm / (math.sqrt(total) + 1e-6))

    def _master_from_params(self) -> None:
        store = self._engine.store
        for number, subgroup in enumerate(store.subgroups):
            state = torch.zeros((3, subgroup.params))
            for piece in subgroup.pieces:
                flat = local(self._params[piece.param]).detach().view(-1)
                state[MASTER, piece.at : piece.at + piece.end - piece.begin] = flat[piece.begin : piece.end]
            store.write(number, state)

    def _plan(self) -> None:
        subgroups = self._engine.store.subgroups
        width = max(subgroup.dtype.itemsize for subgroup in subgroups)
        workload = Workload(
            name="this job",
            params=sum(subgroup.params for subgroup in subgroups),
            subgroup_params=max(subgroup.params for subgroup in subgroups),
            sizes=tuple(subgroup.params for subgroup in subgroups),
            forward_s=0.0,
            backward_s=0.0,
            param_bytes=width,
            grad_bytes=width,
            gpu_free=self._budget,
            gradients_stay=True,
        )
        self._engine.follow(make_plan(self.policy, workload, self._machine), workload)


def _close(engine: Engine, kernel: CpuKernel) -> None:
    engine.close()
    kernel.close()
