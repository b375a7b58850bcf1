"""A small model, and a loop that trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of 280 parameters, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return model.to(dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, begin: int = 0
) -> list[float]:
    """Train for some steps with the data of their numbers; return the losses."""
    losses = []
    dtype = next(model.parameters()).dtype
    for number in range(begin, begin + steps):
        torch.manual_seed(100 + number)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def job(
    kind: Any = torch.optim.AdamW, steps: int = 2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    model = small_model()
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    train(model, optimizer, steps)
    return model, optimizer


def are_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
