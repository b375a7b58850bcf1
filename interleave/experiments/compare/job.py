"""The job that every policy trains: a small GPT with random weights, in bf16, on generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.errors import UserError

_VOCABULARY, _CONTEXT, _BATCH, _HEAD = 512, 64, 2, 64
# Half precision, which optimizer offload is made for.
_DTYPE = torch.bfloat16
_MIN_PARAMS, _MAX_PARAMS = 100_000, 1e11
# Each token follows from the one before up to a random choice of so many, so that there is something to learn.
_CHOICES = 4


@dataclass(frozen=True)
class Shape:
    """Size of a GPT: layers of about 12 width**2 parameters each, with embeddings and a head."""

    layers: int
    width: int

    @property
    def params(self) -> int:
        return self.layers * (12 * self.width + 13) * self.width + (2 * _VOCABULARY + _CONTEXT + 2) * self.width


def find_shape(params: int) -> Shape:
    """Return the shape with about so many parameters, about 128 times as wide as it is deep.

    Raises:
        UserError: No shape has so few or so many parameters.
    """
    if not _MIN_PARAMS <= params <= _MAX_PARAMS:
        raise UserError(f"--params {params:g}: must be from {_MIN_PARAMS:g} to {_MAX_PARAMS:g}")
    width = max(1, round((params * 128 / 12) ** (1 / 3) / _HEAD)) * _HEAD
    widths = {max(_HEAD, width + step) for step in (-_HEAD, 0, _HEAD)}
    shapes = [Shape(max(1, round((params - Shape(0, width).params) / (12 * width**2))), width) for width in widths]
    return min(shapes, key=lambda shape: (abs(shape.params - params), shape.width))


class GPT(nn.Module):  # type: ignore[misc]
    """Maps tokens (batch, length) to the logits of the next tokens (batch, length, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, shape.width)
        self.position = nn.Embedding(_CONTEXT, shape.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width, shape.width // _HEAD, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT, tokens.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))


class Job:
    """A model and its tokens. Jobs with the same shape and seed are equal, bit for bit."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._model = GPT(shape).to(device, _DTYPE)
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    @property
    def params(self) -> list[Any]:
        return list(self._model.parameters())

    def forward(self) -> torch.Tensor:
        """Return the loss on the next batch."""
        self._model.zero_grad()
        tokens = self._tokens().to(self.device)
        logits = self._model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _tokens(self) -> torch.Tensor:
        columns = [torch.randint(_VOCABULARY, (_BATCH,), generator=self._random)]
        choices = torch.randint(_CHOICES, (_BATCH, _CONTEXT), generator=self._random)
        for choice in choices.T:
            columns.append((5 * columns[-1] + choice) % _VOCABULARY)
        return torch.stack(columns, dim=1)
