"""A small training job, run by the reference or by InterleavedAdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.rules.adamw import Hyper

POLICIES = (
    "zero-offload",
    "pipelined",
    "twin-flow:0.4",
    "interleaved:2",
    "interleaved:3@0.6",
    "gpu-only",
)


@dataclass(frozen=True)
class Outcome:
    """The losses of all steps, and the parameters at the end."""

    losses: list[float]
    params: list[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        same = all(
            torch.equal(a, b) for a, b in zip(self.params, other.params, strict=True)
        )
        return same and self.losses == other.losses


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    nn = torch.nn
    layers = (
        nn.Linear(48, 96),
        nn.GELU(),
        nn.Linear(96, 32),
        nn.LayerNorm(32),
        nn.Linear(32, 8),
    )
    return nn.Sequential(*layers).to(dtype)


def batches(
    count: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (
            torch.randn(16, 48, generator=generator).to(dtype),
            torch.randn(16, 8, generator=generator).to(dtype),
        )


class ReferenceAdamW:
    """The update of the reference for every parameter with a gradient, one after the
    other."""

    def __init__(self, params: list[torch.Tensor], hyper: Hyper | None = None) -> None:
        self.params = params
        self.hyper = hyper or Hyper()
        self.steps = [0] * len(params)
        self.state = [torch.zeros((3, param.numel())) for param in params]
        for param, state in zip(params, self.state, strict=True):
            state[0] = param.detach().reshape(-1)

    def step(self, scale: float = 1.0) -> None:
        for index, (param, state) in enumerate(
            zip(self.params, self.state, strict=True)
        ):
            if param.grad is None:
                continue
            self.steps[index] += 1
            scalars = self.hyper.scalars(self.steps[index], scale)
            reference.update(
                param.grad.reshape(-1), state, param.detach().view(-1), scalars
            )


def train(
    make: Callable[[list[torch.Tensor]], ReferenceAdamW | InterleavedAdamW],
    steps: int = 50,
    dtype: torch.dtype = torch.bfloat16,
) -> Outcome:
    job = model(dtype)
    params = list(job.parameters())
    optimizer = make(params)
    losses = []
    for inputs, targets in batches(steps, dtype):
        loss = ((job(inputs).float() - targets.float()) ** 2).mean()
        losses.append(loss.item())
        job.zero_grad()
        loss.backward()
        optimizer.step()
    if isinstance(optimizer, InterleavedAdamW):
        optimizer.close()
    return Outcome(losses, [param.detach().clone() for param in params])


@contextmanager
def closing(optimizer: InterleavedAdamW) -> Iterator[InterleavedAdamW]:
    try:
        yield optimizer
    finally:
        optimizer.close()
