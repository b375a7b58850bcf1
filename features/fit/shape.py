"""The shape of a decoder whose memory is counted: by its configuration, or by its
size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import UserError
from ebbtide.features.advise.job.decoder import TransformerShape

# Types of models whose layers are counted.
COUNTED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Rank of the adapters of a job (`jobs/templates/train.py.j2`).
LORA_RANK = 16


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    kind: str  # Its `model_type`.
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int  # Width of the feed-forward network.
    is_tied: bool
    longest: int | None = None  # Positions; None: not known.

    @property
    def has_query_norms(self) -> bool:
        """Whether queries and keys are normalized."""
        return self.kind == "qwen3"

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_size

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a layer."""
        h, f = self.hidden, self.inner
        attention = [(h, self.queries), (h, self.keys), (h, self.keys)]
        return [*attention, (self.queries, h), (h, f), (h, f), (f, h)]

    @property
    def linear_params(self) -> int:
        """Weights of the linear layers of a layer."""
        return sum(rows * columns for rows, columns in self.linears)

    @property
    def small_params(self) -> int:
        """Norms and biases of a layer."""
        norms = 2 * self.hidden + 2 * self.head_size * self.has_query_norms
        biases = self.queries + 2 * self.keys if self.kind == "qwen2" else 0
        return norms + biases

    @property
    def layer_params(self) -> int:
        """Parameters of a layer."""
        return self.linear_params + self.small_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding, as many as the head has."""
        return self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        ends = (1 if self.is_tied else 2) * self.embedding_params + self.hidden
        return self.layers * self.layer_params + ends

    @property
    def adapter_params(self) -> int:
        """Parameters of adapters on the linear layers of a layer."""
        return LORA_RANK * sum(rows + columns for rows, columns in self.linears)

    def config(self) -> dict[str, Any]:
        """Return a configuration of transformers with these sizes."""
        return {
            "model_type": self.kind,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": self.longest or 1 << 20,
        }


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model's configuration. Raises UserError if its layers are
    of a type that is not counted, or it lacks a size."""
    kind = config.get("model_type")
    if kind not in COUNTED_TYPES:
        raise UserError(
            f"{name} is of type {kind}, whose memory plan does not count (it counts "
            f"{', '.join(COUNTED_TYPES)}): predict it with `ebbtide dry-run --model "
            f"{name}`, and plan the trace"
        )
    try:
        heads, width = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            kind=kind,
            vocabulary=config["vocab_size"],
            hidden=width,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or width // heads,
            inner=config["intermediate_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            longest=_longest(config),
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"the configuration of {name} has no usable {error}") from None


def _longest(config: Mapping[str, Any]) -> int | None:
    """Return the most positions with fused attention: a window that slides needs a
    mask."""
    longest: int | None = config.get("max_position_embeddings")
    window = config.get("sliding_window") if config["model_type"] == "mistral" else None
    return min(filter(None, (longest, window)), default=None)


def shape_of_size(shape: TransformerShape) -> ModelShape:
    """Return the shape of a decoder of so many parameters as one of Llama."""
    heads = shape.heads or max(1, shape.hidden // shape.head_size)
    parts, embedding = shape.parts, shape.vocabulary * shape.hidden
    left = shape.params - embedding * (1 if parts.is_tied else 2)
    is_tied = parts.is_tied if parts.is_tied is not None else left < shape.params / 2
    if parts.is_tied is None and is_tied:
        left = shape.params - embedding
    queries = heads * shape.head_size
    kv_heads = parts.key_value_heads or heads
    attention = 2 * shape.hidden * (queries + kv_heads * shape.head_size)
    inner = round((left / shape.layers - attention) / 3 / shape.hidden)
    if inner < 1:
        raise UserError(
            f"{shape.params:,} parameters are too few for {shape.text}: state "
            "--layers, --hidden and --vocabulary of the model"
        )
    return ModelShape(
        "llama",
        shape.vocabulary,
        shape.hidden,
        shape.layers,
        heads,
        kv_heads,
        shape.head_size,
        inner,
        is_tied,
    )
