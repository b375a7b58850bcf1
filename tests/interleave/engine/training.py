"""Training jobs as users write them, with InterleavedAdamW or with the same optimizer
based on the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.norm import sum_of_squares, total
from ebbtide.interleave.engine.rules.adamw import Hyper
from ebbtide.machines.machine import Machine
from tests.interleave.engine.jobs import Outcome

# (parameters or groups, options) -> an optimizer
Make = Callable[..., Any]
MODES = ("kept", "streamed")
# The links are slow, so that `adaptive` has a choice.
MACHINE = Machine(
    name="test",
    h2d_bytes_per_s=40e6,
    d2h_bytes_per_s=40e6,
    h2d_pageable_bytes_per_s=40e6,
    d2h_pageable_bytes_per_s=40e6,
    host_memory_bytes_per_s=1e10,
    cpu_update_params_per_s=1e7,
    cpu_cast_params_per_s=1e8,
    gpu_update_params_per_s=1e8,
)


class ReferenceOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """The results of InterleavedAdamW without any plan: state in plain tensors, one
    parameter after the other."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = None,
        loss_scale: float | str | None = None,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._max_norm = max_grad_norm
        self._dynamic = loss_scale == "dynamic"
        self.loss_scale = 65536.0 if self._dynamic else float(loss_scale or 1.0)
        self.skipped = 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def step(self, closure: None = None) -> None:
        params = [
            (param, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        norm = (
            math.sqrt(total(sum_of_squares(param.grad) for param, _ in params))
            / self.loss_scale
        )
        scale = (
            1.0 if self._max_norm is None else min(1.0, self._max_norm / (norm + 1e-6))
        ) / self.loss_scale
        if not math.isfinite(norm):
            assert self._dynamic
            self.loss_scale /= 2
            self.skipped += 1
            return
        for param, group in params:
            state = self.state[param]
            if not state:
                master = param.detach().float().reshape(-1).clone()
                state.update(
                    step=0,
                    rows=[master, torch.zeros_like(master), torch.zeros_like(master)],
                )
            state["step"] += 1
            hyper = Hyper(
                float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]
            )
            scalars = hyper.scalars(state["step"], scale)
            reference.update(
                param.grad.reshape(-1), state["rows"], param.detach().view(-1), scalars
            )


class Net(nn.Module):  # type: ignore[misc]
    """A network whose forward uses one of several branches; the first and the last
    layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.branches = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.late = nn.Linear(24, 24)
        self.last = nn.Linear(24, 24)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        hidden = torch.tanh(self.branches[branch](torch.tanh(self.first(inputs))))
        return self.last(torch.tanh(self.late(self.norm(hidden))))


def maker(policy: str, mode: str, **defaults: Any) -> Make:
    def make(params: Any, **options: Any) -> InterleavedAdamW:
        arguments = {"subgroup_params": 500, "threads": 1, **defaults, **options}
        return InterleavedAdamW(params, policy=policy, gradients=mode, **arguments)

    return make


def throttle_cpu(
    optimizer: InterleavedAdamW, params_per_s: Callable[[], float]
) -> None:
    """Delay the updates on the CPU to a rate."""
    kernel = optimizer._runner.kernel

    def throttle(update: Callable[..., None]) -> Callable[..., None]:
        def throttled(*arguments: Any, **options: Any) -> None:
            end_s = time.perf_counter() + len(arguments[0]) / params_per_s()
            update(*arguments, **options)
            time.sleep(max(0.0, end_s - time.perf_counter()))

        return throttled

    kernel.update_ranges = throttle(kernel.update_ranges)  # type: ignore[method-assign]
    kernel.update_beside = throttle(kernel.update_beside)  # type: ignore[method-assign]


def net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield (
            torch.randn(8, 24, generator=generator).to(dtype),
            torch.randn(8, 24, generator=generator),
        )


class Job:
    """A network, its data and the losses so far. `branch` gives the branch of a step;
    by default it is the first."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        branch: Callable[[int], int] = lambda step: 0,
    ) -> None:
        self.net = net(dtype)
        self.losses: list[float] = []
        self._batches = batches(dtype)
        self._branch = branch

    def loss(self, step: int = 0) -> torch.Tensor:
        inputs, targets = next(self._batches)
        loss = ((self.net(inputs, self._branch(step)).float() - targets) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def step(self, optimizer: Any, step: int = 0, backwards: int = 1) -> None:
        """Run zero_grad, some backwards, and a step of the optimizer."""
        self.net.zero_grad()
        for _ in range(backwards):
            optimizer.scale(self.loss(step)).backward()
        optimizer.step()

    def outcome(self) -> Outcome:
        return Outcome(
            self.losses, [param.detach().clone() for param in self.net.parameters()]
        )


def run(
    job: Job,
    optimizer: Any,
    steps: int = 50,
    backwards: Callable[[int], int] = lambda step: 1,
) -> Outcome:
    """Run some steps, and close the optimizer."""
    for step in range(steps):
        job.step(optimizer, step, backwards(step))
    return finish(job, optimizer)


def finish(job: Job, optimizer: Any) -> Outcome:
    if isinstance(optimizer, InterleavedAdamW):
        optimizer.close()
    return job.outcome()


def two_groups(job: Job) -> list[dict[str, Any]]:
    """Return two groups with their own hyperparameters, and together all parameters
    except those of `late`."""
    params = [
        param
        for name, param in job.net.named_parameters()
        if not name.startswith("late")
    ]
    return [
        {"params": params[:4], "lr": 3e-3, "weight_decay": 0.1},
        {"params": params[4:], "weight_decay": 0.0},
    ]
