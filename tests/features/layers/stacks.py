"""Small models of layers, and their training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ebbtide.interleave import InterleavedAdamW
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from tests.interleave.engine.training import MACHINE

WIDTH, LENGTH = 32, 24
# One layer saves its input and the output of its function.
LAYER_BYTES = 2 * 4 * WIDTH * LENGTH
# Weights and bias of one layer.
WEIGHT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[torch.Tensor], Any] = torch.is_tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.after(y)
        return self.linear(y) + y


class Stack(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int = 5) -> Stack:
    torch.manual_seed(0)
    return Stack(layers)


def train(model: Any, steps: int = 1) -> list[torch.Tensor]:
    """Return losses and gradients."""
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(torch.randn(LENGTH, WIDTH)).square().mean()
        loss.backward()
        results += [
            loss.detach(),
            *(param.grad.clone() for param in model.parameters()),
        ]
    return results


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def interleaved(
    model: nn.Module,
    device: EmulatedDevice | None,
    overlap: Any,
    gradients: Any,
    lr: float = 0.01,
) -> InterleavedAdamW:
    """Return an optimizer of several subgroups with late updates, or without."""
    return InterleavedAdamW(
        [param for param in model.parameters() if param.requires_grad],
        lr=lr,
        policy="pipelined",
        machine=MACHINE,
        subgroup_params=500,
        device=device,
        overlap=overlap,
        gradients=gradients,
        model=model,
    )
