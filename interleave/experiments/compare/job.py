"""The job that every policy trains: a small GPT with random weights, in bf16, on generated tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.errors import UserError

_VOCABULARY, _CONTEXT, _BATCH, _HEAD = 512, 64, 2, 64
# Where phases wait, little arithmetic is left beside that.
_CONTEXT_WITH_WAITS, _BATCH_WITH_WAITS = 8, 1
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


class PhaseWaits(NamedTuple):
    """Seconds that forward and backward wait, in addition to their arithmetic, as if a GPU computed meanwhile."""

    forward_s: float = 0.0
    backward_s: float = 0.0


class _Wait(torch.autograd.Function):  # type: ignore[misc]
    """The identity, which waits in the forward, and in the backward before the gradients of what came before it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, waits: PhaseWaits) -> torch.Tensor:
        ctx.backward_s = waits.backward_s
        time.sleep(waits.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradient, None


class GPT(nn.Module):  # type: ignore[misc]
    """Maps tokens (batch, length) to the logits of the next tokens (batch, length, vocabulary).

    Args:
        shape: The size.
        waits: Waits of the whole model, none by default; each layer has its part by its parameters.
    """

    def __init__(self, shape: Shape, waits: PhaseWaits | None = None) -> None:
        super().__init__()
        self._waits = waits or PhaseWaits()
        self._params = shape.params
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
        length = tokens.shape[1]
        x = self._waited(self.token(tokens) + self.position.weight[:length], self.token, self.position)
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device, x.dtype)
        for layer in self.layers:
            x = self._waited(layer(x, mask, is_causal=True), layer)
        return self._waited(self.head(self.norm(x)), self.norm, self.head)

    def _waited(self, x: torch.Tensor, *modules: nn.Module) -> torch.Tensor:
        """Wait for the part of modules that have returned x."""
        if not any(self._waits):
            return x
        share = sum(param.numel() for module in modules for param in module.parameters()) / self._params
        return _Wait.apply(x, PhaseWaits(*(share * seconds for seconds in self._waits)))


class Job:
    """A model and its tokens. Jobs with the same shape and seed are equal, bit for bit.

    With waits it has fewer tokens, so that the phases are little more than their waits.

    Attributes:
        model: The model.
        device: Its device.
    """

    def __init__(self, shape: Shape, seed: int, device: torch.device, waits: PhaseWaits | None = None) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = GPT(shape, waits).to(device, _DTYPE)
        self.device = device
        is_waiting = any(waits or ())
        self._context = _CONTEXT_WITH_WAITS if is_waiting else _CONTEXT
        self._batch = _BATCH_WITH_WAITS if is_waiting else _BATCH
        self._random = torch.Generator().manual_seed(seed)

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def forward(self) -> torch.Tensor:
        """Return the loss on the next batch."""
        self.model.zero_grad()
        tokens = self._tokens().to(self.device)
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _tokens(self) -> torch.Tensor:
        columns = [torch.randint(_VOCABULARY, (self._batch,), generator=self._random)]
        choices = torch.randint(_CHOICES, (self._batch, self._context), generator=self._random)
        for choice in choices.T:
            columns.append((5 * columns[-1] + choice) % _VOCABULARY)
        return torch.stack(columns, dim=1)
