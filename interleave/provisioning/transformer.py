"""Arithmetic and activation memory of a decoder of which little more than its number of parameters is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbtide.errors import WorkloadError

# Published decoders from 1e9 to 1e11 parameters have about this width per layer (GPT-3 6.7B: 128, Llama 65B: 102).
_WIDTH_PER_LAYER = 128
# Weights of a layer: 4 h^2 of attention and 8 h^2 of the feed-forward network.
_LAYER_WEIGHTS = 12
# Bytes per token and hidden unit that a layer keeps for the backward, in half precision, without attention scores;
# and its input alone, which full checkpointing keeps. Korthikanti et al. 2022, "Reducing Activation Recomputation in
# Large Transformer Models", equation 1 and section 5, where fused attention keeps no scores.
_LAYER_BYTES = 34
_CHECKPOINT_BYTES = 2
# Bytes per token and entry of the vocabulary: logits in fp32, and their gradients.
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a decoder.

    Attributes:
        params: Parameters.
        layers: Layers.
        hidden: Width of a layer.
        vocabulary: Entries of the vocabulary.
        sequence: Tokens of a sample.
    """

    params: int
    layers: int
    hidden: int
    vocabulary: int
    sequence: int

    @property
    def layer_params(self) -> float:
        """Parameters of a layer."""
        return self.params / self.layers

    def forward_flops(self, tokens: float) -> float:
        """Return the operations of a forward; a backward has twice as many.

        2 per parameter and token, and for causal attention 2 layers x hidden x sequence per token.
        """
        return tokens * (2.0 * self.params + 2.0 * self.layers * self.hidden * self.sequence)

    def kept_bytes(self, tokens: float, checkpointing: bool) -> float:
        """Return the bytes of activations that a forward over `tokens` tokens keeps, without the logits."""
        return tokens * self.hidden * self.layers * (_CHECKPOINT_BYTES if checkpointing else _LAYER_BYTES)

    def layer_bytes(self, tokens: float) -> float:
        """Return the bytes of activations of one layer, which checkpointing computes again in the backward."""
        return tokens * self.hidden * _LAYER_BYTES

    def logit_bytes(self, tokens: float) -> float:
        """Return the bytes of the logits; their gradients take as many."""
        return tokens * self.vocabulary * _LOGIT_BYTES


def checkpointed_share(params: int) -> float:
    """Return the share of a decoder's activations that remains with full checkpointing: inputs, and one layer."""
    layers = guessed_layers(params)
    return min(1.0, _CHECKPOINT_BYTES / _LAYER_BYTES + 1 / layers)


def guessed_layers(params: int) -> int:
    """Return the layers of a decoder of usual proportions, 128 hidden units per layer: params = 12 layers hidden^2."""
    return max(1, round(math.cbrt(params / (_LAYER_WEIGHTS * _WIDTH_PER_LAYER**2))))


def shape_of(
    params: int, sequence: int, vocabulary: int, layers: int | None = None, hidden: int | None = None
) -> TransformerShape:
    """Return the shape of a decoder; what is not given follows from params = 12 layers hidden^2.

    Raises:
        WorkloadError: There are no parameters.
    """
    if params < 1:
        raise WorkloadError("--params must be at least 1")
    if layers is None:
        layers = guessed_layers(params) if hidden is None else max(1, round(params / (_LAYER_WEIGHTS * hidden**2)))
    if hidden is None:
        hidden = max(1, round(math.sqrt(params / (_LAYER_WEIGHTS * layers))))
    return TransformerShape(params, layers, hidden, vocabulary, sequence)
