"""The model of the published `cs336-medium-*` snapshots, rebuilt from its
description."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, BATCH = 10_000, 1024, 24, 16, 4096, 4


class MediumProjection(nn.Module):
    """A linear map without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class MediumNorm(nn.Module):
    """Division by the root of the mean square, computed in fp32, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.gain * values).to(x.dtype)


class MediumRotation(nn.Module):
    """Rotary position embedding that all blocks share."""

    def __init__(self, context: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(context), 10_000.0 ** (-torch.arange(0, size, 2) / size)
        )
        self.register_buffer(
            "waves", torch.stack((torch.cos(angles), torch.sin(angles))).to("cuda")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even, odd_part = x.reshape(*x.shape[:-1], -1, 2).movedim(-1, 0).unbind(0)
        cos, sin = self.waves[:, : x.shape[-2]].unbind(0)
        first = cos * even - sin * odd_part
        second = sin * even + cos * odd_part
        return torch.cat((first, second), dim=-1)


def medium_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, by its parts."""
    shifted = x - x.max(dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


class MediumAttention(nn.Module):
    """Causal attention by its parts."""

    def __init__(self, rotation: MediumRotation) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            MediumProjection(WIDTH, WIDTH) for _ in range(4)
        )
        self.rotation = rotation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in (q, k, v)
        )
        q, k = self.rotation(q), self.rotation(k)
        order = torch.arange(length, device="cuda")
        mask = (order[:, None] >= order[None])[None]
        attended = _attend(q, k, v, mask)
        return self.o(attended.transpose(1, 2).reshape(batch, length, WIDTH))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
    scores = torch.where(mask, scores, float("-inf"))
    weights = medium_softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class MediumBlock(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, rotation: MediumRotation) -> None:
        super().__init__()
        self.attention = MediumAttention(rotation)
        self.w1, self.w2, self.w3 = (
            MediumProjection(WIDTH, HIDDEN),
            MediumProjection(HIDDEN, WIDTH),
            MediumProjection(WIDTH, HIDDEN),
        )
        self.norm_1, self.norm_2 = MediumNorm(), MediumNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.attention(self.norm_1(x))
        middle = x + attended
        change = self._feed_forward(self.norm_2(middle))
        return middle + change

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(_silu(self.w1(x)) * self.w3(x))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class MediumModel(nn.Module):
    """The decoder."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device="cuda"))
        rotation = MediumRotation(context)
        self.blocks = nn.ModuleList(MediumBlock(rotation) for _ in range(LAYERS))
        self.norm, self.head = MediumNorm(), MediumProjection(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # The embedded tokens are held until the end.
        embedded = x = self.embedding[tokens, :]
        assert embedded.shape[-1] == WIDTH
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def medium_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy by its parts."""
    losses = -_log_softmax(logits)
    return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    shifted = logits - logits.max(dim=-1, keepdim=True)[0]
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))


class ReplacingAdamW(torch.optim.Optimizer):
    """AdamW written out that makes new moments in each step, and zeros that it uses in
    the first one only."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad.data, self.state[parameter]
                parameter.data -= group["lr"] * group["weight_decay"] * parameter.data
                before_m = state.get("m", torch.zeros_like(grad))
                before_v = state.get("v", torch.zeros_like(grad))
                m = 0.9 * before_m + 0.1 * grad
                v = 0.999 * before_v + 0.001 * torch.square(grad)
                parameter.data -= group["lr"] * m / (torch.sqrt(v) + group["eps"])
                state["m"], state["v"] = m, v
