"""The model of the published `cs336-*` snapshots, rebuilt from its description."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, BATCH = 10_000, 2560, 32, 32, 10_240, 4


class Projection(nn.Module):
    """A linear map without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As einsum of torch 2.7 did; that of 2.13 exchanges the operands, and its
        # result is contiguous.
        product = torch.bmm(self.weight.unsqueeze(0), x.flatten(0, -2).t().unsqueeze(0))
        return product.squeeze(0).t().view(*x.shape[:-1], -1)


class Norm(nn.Module):
    """Division by the root of the mean square, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = torch.sqrt(torch.linalg.vector_norm(x, dim=-1) ** 2 / WIDTH + 1e-5)
        return torch.einsum("d,bsd->bsd", self.gain, x / root.unsqueeze(-1)).to(x.dtype)


class Rotation(nn.Module):
    """Rotary position embedding of one block."""

    def __init__(self, context: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(context, device="cuda"),
            10_000 ** (-torch.arange(0, size, 2, device="cuda") / size),
        )
        self.register_buffer("cos", torch.cos(angles))
        self.register_buffer("sin", torch.sin(angles))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        pairs = x.unflatten(-1, (-1, 2))
        even, odd_part = pairs[..., 0], pairs[..., 1]
        rotated = torch.empty_like(x)
        rotated[..., ::2] = cos * even - sin * odd_part
        rotated[..., 1::2] = sin * even + cos * odd_part
        return rotated


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, by its parts."""
    exponentials = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


class Attention(nn.Module):
    """Causal attention by its parts."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Projection(WIDTH, WIDTH) for _ in range(4))
        self.rotation = Rotation(context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        positions = torch.arange(length, device="cuda").expand(batch, length)
        q, k = self.rotation(q, positions), self.rotation(k, positions)
        mask = ~torch.triu(torch.ones(length, length, device="cuda"), diagonal=1).bool()
        mask = mask.expand(batch, HEADS, length, length)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
        weights = softmax(scores.masked_fill(~mask, float("-inf")))
        attended = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return self.o(attended.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = Norm(), Attention(context), Norm()
        self.w1, self.w2, self.w3 = (
            Projection(WIDTH, HIDDEN),
            Projection(HIDDEN, WIDTH),
            Projection(WIDTH, HIDDEN),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        normalized = self.norm_2(x)
        gate, linear = self.w1(normalized), self.w3(normalized)
        return x + self.w2(gate * torch.sigmoid(gate) * linear)


class PublishedModel(nn.Module):
    """The decoder."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device="cuda"))
        self.blocks = nn.ModuleList(Block(context) for _ in range(LAYERS))
        self.norm, self.head = Norm(), Projection(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def published_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy by its parts."""
    logits, targets = logits.view(-1, VOCABULARY), targets.view(-1)
    shifted = logits - logits.max(dim=-1, keepdim=True)[0]
    sums = torch.exp(shifted).sum(dim=-1)
    chosen = shifted[torch.arange(len(targets), device="cuda"), targets]
    return torch.mean(torch.log(sums) - chosen)


class SimpleAdamW(torch.optim.Optimizer):
    """AdamW written out, one parameter at a time, with the two temporaries that the
    snapshot shows."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"], state["v"] = (
                        torch.zeros_like(parameter),
                        torch.zeros_like(parameter),
                    )
                state["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(
                    parameter.grad, parameter.grad, value=0.001
                )
                parameter.addcdiv_(
                    state["m"], state["v"].sqrt() + group["eps"], value=-group["lr"]
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
