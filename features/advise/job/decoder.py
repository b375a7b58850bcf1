"""The kernels of the passes of a decoder, timed as a dry run times them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ebbtide.errors import WorkloadError
from ebbtide.features.advise.job.training_job import TunableSettings
from ebbtide.machines.kernels import time_priors as priors
from ebbtide.machines.kernels.efficiency import AttentionSize, ProductSize
from ebbtide.machines.kernels.rates import GpuRates, KernelWork
from ebbtide.machines.kernels.time_priors import PriorRange, WorkClass
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import PARAM_BYTES

# Published decoders from 1e9 to 1e11 parameters have about this width per layer (GPT-3
# 6.7B: 128, Llama 65B: 102).
_WIDTH_PER_LAYER = 128
# Weights of a layer: 4 h^2 of attention and 8 h^2 of the feed-forward network.
_LAYER_WEIGHTS = 12
# Bytes per token and hidden unit that a layer keeps for the backward, in half
# precision, without attention scores; and its input alone, which full checkpointing
# keeps. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
# Transformer Models", equation 1 and section 5, where fused attention keeps no scores.
_LAYER_BYTES = 34
_CHECKPOINT_BYTES = 2
# Bytes per token and entry of the vocabulary: logits in fp32, and their gradients.
_LOGIT_BYTES = 4
# Wider models have heads of 128, others of 64 (GPT-2, Llama 3.2 1B; Llama 3.2 3B).
_WIDE = 3072
# Attention whose scores are in device memory: by products of matrices, and a softmax.
MATH = "math"


class ElementwiseWork(NamedTuple):
    """Work of a layer beside products and attention, in one direction: launches, and
    bytes of device memory per token and hidden unit, unit of the feed-forward network,
    and entry of the vocabulary (once)."""

    hidden_bytes: float
    feed_forward_bytes: float
    vocabulary_bytes: float
    launches: int


class Runtime(NamedTuple):
    """Software that runs a job. Overhead: the time of a step over the time of its
    kernels, for gaps and waits."""

    forward: ElementwiseWork
    backward: ElementwiseWork
    overhead: PriorRange
    # Whether a job of which nothing is known may be of this kind.
    is_likely: bool = True
    # Whether compute hides nothing of exchanges; else it is not known how much.
    exposes_exchanges: bool = False


# Fused kernels (torch.compile, Liger, Megatron's), or operation by operation: norms
# with copies in fp32, rotations of queries and keys, residual sums, the activation; the
# loss with logits in fp32. Shares of the peak were fitted to a job of the first kind;
# plain PyTorch reaches 0.33 to 0.39 of an H100 in training Llama 3 8B (torchtitan).
# ZeRO-3 of DeepSpeed hides neither exchanges nor copies of gradients in fp32 (traces/,
# h100-20b and a100-13b).
RUNTIMES = {
    "fused": Runtime(
        ElementwiseWork(16, 6, 4, 20),
        ElementwiseWork(30, 18, 6, 40),
        PriorRange(1.0, 1.0, 1.08),
    ),
    "eager": Runtime(
        ElementwiseWork(70, 10, 14, 45),
        ElementwiseWork(140, 20, 18, 90),
        PriorRange(1.0, 1.12, 1.3),
    ),
    "deepspeed": Runtime(
        ElementwiseWork(40, 8, 9, 45),
        ElementwiseWork(80, 19, 12, 90),
        PriorRange(0.95, 1.06, 1.25),
        False,
        True,
    ),
}
# Bytes of a score of attention that a fused softmax moves, forward and backward, where
# scores are in device memory.
_SCORE_BYTES = 4, 6


@dataclass(frozen=True)
class Implementation:
    """Software and kernels of a job; None is not stated, so that times span the likely
    ones."""

    runtime: str | None = None  # One of `RUNTIMES`.
    attention: str | None = None
    # The share of the gradients that is copied to the host.
    offloaded_share: float = 1.0

    @property
    def text(self) -> str:
        """The implementation in words."""
        return (
            f"runtime {self.runtime or 'fused or eager'}, attention "
            f"{self.attention or 'any fused one'}"
        )

    @property
    def runtimes(self) -> list[Runtime]:
        """The runtimes that the job may have."""
        return [
            one
            for name, one in RUNTIMES.items()
            if (name == self.runtime if self.runtime else one.is_likely)
        ]


NOT_STATED = Implementation()


@dataclass(frozen=True)
class Parallelism:
    """Ranks that share a replica of the model: `tensor` of them the widths of each
    layer and its tokens (sequence parallelism), `pipeline` stages the layers, one
    micro-step forward and one backward at a time."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.pipeline

    def bubble(self, micro_steps: int) -> float:
        """Return the time of all micro-steps over that without waits for other stages
        (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
        Clusters", section 2.2)."""
        return (micro_steps + self.pipeline - 1) / micro_steps


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parts of a decoder's layers that differ from the usual ones."""

    head_size: int | None = None  # None: by the heads, else by the width.
    key_value_heads: int | None = None  # None: as many as heads.
    is_gated: bool = True  # Whether the feed-forward network has three matrices.
    is_tied: bool | None = None  # Whether both ends share an embedding; None: guessed.
    experts: int = 1
    active_experts: int = 1  # Experts that each token runs through.
    parallel: Parallelism = Parallelism()


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a decoder."""

    params: int
    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    head_size: int = 128
    heads: int | None = None  # None: so many that their width is the layer's.
    parts: LayerParts = LayerParts()

    @property
    def parallel(self) -> Parallelism:
        """The ranks that share it."""
        return self.parts.parallel

    @property
    def query_width(self) -> float:
        """The width of the queries of all heads."""
        return self.hidden if self.heads is None else self.heads * self.head_size

    @property
    def key_width(self) -> float:
        """The width of the keys of all heads, and of their values."""
        heads = self.parts.key_value_heads
        return self.query_width if heads is None else heads * self.head_size

    @property
    def attention_weights(self) -> float:
        """Weights of the products of attention in a layer."""
        usual = 2 * self.hidden * (self.query_width + self.key_width)
        if self.heads is not None:
            return usual
        # Small models that are mostly embeddings have less.
        return min(usual, 0.5 * self.layer_weights)

    @property
    def active_share(self) -> float:
        """The share of the feed-forward network that a token runs through."""
        return self.parts.active_experts / self.parts.experts

    @property
    def text(self) -> str:
        """The layers in words, with the parts that are stated."""
        parts, texts = self.parts, [f"{self.layers} layers of width {self.hidden:,}"]
        if self.heads is not None:
            keys = parts.key_value_heads or self.heads
            texts.append(f"{self.heads} heads of {self.head_size}, {keys} of keys")
        if parts.experts > 1:
            texts.append(f"{parts.active_experts} of {parts.experts} experts")
        if self.parallel.tensor > 1:
            texts.append(f"tensor parallel over {self.parallel.tensor} ranks")
        if self.parallel.pipeline > 1:
            texts.append(f"{self.parallel.pipeline} pipeline stages")
        return ", ".join(texts)

    @property
    def layer_params(self) -> float:
        """Parameters of a layer."""
        return self.params / self.layers

    @property
    def layer_weights(self) -> float:
        """Weights of the products of a layer: without embeddings, of which small models
        have one for both ends."""
        embedding = self.vocabulary * self.hidden
        usual = _LAYER_WEIGHTS * self.layers * self.hidden**2
        is_tied = self.parts.is_tied
        if is_tied is None:
            is_tied = self.params - 2 * embedding < _TIED * usual
        weights = self.params - embedding * (1 if is_tied else 2)
        return max(weights, 0.1 * self.params) / self.layers

    @property
    def feed_forward_width(self) -> float:
        """The width of the feed-forward network of an expert, with the weights that
        attention leaves."""
        matrices = (3 if self.parts.is_gated else 2) * self.parts.experts
        left = self.layer_weights - self.attention_weights
        return left / matrices / self.hidden

    def tokens(self, settings: TunableSettings) -> int:
        """Return the tokens of a micro-step on a rank."""
        return self.sequence * (settings.micro_batch or 1)

    def forward_flops(self, tokens: float) -> float:
        """Return the operations of a forward, half those of a backward: 2 per weight
        and token, and for causal attention 2 layers x width of the queries x sequence
        per token."""
        idle = (1 - self.active_share) * (self.layer_weights - self.attention_weights)
        weights = self.layers * (self.layer_weights - idle)
        scores = self.layers * self.query_width * self.sequence
        return tokens * 2.0 * (weights + self.vocabulary * self.hidden + scores)

    def kept_bytes(self, tokens: float, checkpointing: bool) -> float:
        """Return the bytes of activations that a forward over `tokens` tokens keeps,
        without the logits."""
        size = _CHECKPOINT_BYTES if checkpointing else _LAYER_BYTES
        # The first stage keeps as many micro-steps as there are stages.
        return tokens * self.hidden * self.layers * size / self.parallel.tensor

    def layer_bytes(self, tokens: float) -> float:
        """Return the bytes of activations of one layer, which checkpointing computes
        again in the backward."""
        return tokens * self.hidden * _LAYER_BYTES / self.parallel.tensor

    def logit_bytes(self, tokens: float) -> float:
        """Return the bytes of the logits; their gradients take as many."""
        return tokens * self.vocabulary * _LOGIT_BYTES / self.parallel.tensor


# With less than this share of 12 h^2 a layer besides two embeddings, a model has one
# embedding.
_TIED = 0.85


def checkpointed_share(params: int) -> float:
    """Return the share of a decoder's activations that remains with full checkpointing:
    inputs, and one layer."""
    layers = guessed_layers(params)
    return min(1.0, _CHECKPOINT_BYTES / _LAYER_BYTES + 1 / layers)


def guessed_layers(params: int) -> int:
    """Return the layers of a decoder of usual proportions, 128 hidden units per layer:
    params = 12 layers hidden^2."""
    return max(1, round(math.cbrt(params / (_LAYER_WEIGHTS * _WIDTH_PER_LAYER**2))))


def shape_of(
    params: int,
    sequence: int,
    vocabulary: int,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int = 0,
    parts: LayerParts | None = None,
) -> TransformerShape:
    """Return the shape of a decoder; what is not given follows from params = 12 layers
    hidden^2. Raises WorkloadError for parts that cannot be."""
    parts = parts or LayerParts()
    if params < 1:
        raise WorkloadError("--params must be at least 1")
    if layers is None:
        layers = (
            guessed_layers(params)
            if hidden is None
            else max(1, round(params / (_LAYER_WEIGHTS * hidden**2)))
        )
    if hidden is None:
        hidden = max(1, round(math.sqrt(params / (_LAYER_WEIGHTS * layers))))
    head_size = parts.head_size
    if head_size is None:
        head_size = max(1, hidden // heads) if heads else 128 if hidden >= _WIDE else 64
    has_own_width = bool(parts.head_size or parts.key_value_heads)
    heads = heads or max(1, hidden // head_size)
    shape = TransformerShape(
        params=params,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        sequence=sequence,
        head_size=head_size,
        heads=heads if has_own_width else None,
        parts=parts,
    )
    _check_parts(shape, heads)
    return shape


def _check_parts(shape: TransformerShape, heads: int) -> None:
    parts = shape.parts
    if parts.active_experts > parts.experts:
        raise WorkloadError(
            f"--active-experts {parts.active_experts} is more than --experts "
            f"{parts.experts}"
        )
    if parts.key_value_heads and heads % parts.key_value_heads:
        raise WorkloadError(
            f"--kv-heads {parts.key_value_heads} does not divide the {heads} heads "
            "(--heads)"
        )
    if parts.parallel.tensor > heads:
        raise WorkloadError(
            f"--tensor-parallel {parts.parallel.tensor} is more than {heads} heads"
        )
    if parts.parallel.pipeline > shape.layers:
        raise WorkloadError(
            f"--pipeline-parallel {parts.parallel.pipeline} is more than "
            f"{shape.layers} layers"
        )
    if shape.attention_weights >= shape.layer_weights:
        raise WorkloadError(
            f"attention of {heads} heads of {shape.head_size} has more weights than a "
            "layer: state the --layers and --hidden of the model"
        )


def compute_span(
    shape: TransformerShape,
    tokens: float,
    machine: Machine,
    precision: str,
    implementation: Implementation,
) -> tuple[PriorRange, PriorRange]:
    """Return the times of a forward and of a backward of `tokens` tokens without
    recomputation, s. Where the implementation is not known, the ends are the least
    and the most of all likely ones, and the typical time is their geometric mean."""
    rates = GpuRates(machine)
    kinds = (
        [implementation.attention]
        if implementation.attention
        else rates.fused_attention
    )
    choices = list(product(implementation.runtimes, kinds))
    forward, backward = (
        _Direction(shape, tokens, precision, is_backward)
        for is_backward in (False, True)
    )
    return _union(forward.time(rates, *choice) for choice in choices), _union(
        backward.time(rates, *choice) for choice in choices
    )


def _union(ranges: Iterable[PriorRange]) -> PriorRange:
    fast, typical, slow = zip(*ranges, strict=True)
    return PriorRange(min(fast), math.prod(typical) ** (1 / len(typical)), max(slow))


class _Direction(NamedTuple):
    """The kernels of a forward or a backward."""

    shape: TransformerShape
    tokens: float
    precision: str
    is_backward: bool

    def time(self, rates: GpuRates, runtime: Runtime, attention: str) -> PriorRange:
        """Return the time in s: the host runs ahead of the GPU, or the GPU waits for
        launches."""
        shape, hidden = self.shape, self.shape.hidden
        tensor = shape.parallel.tensor
        work = runtime.backward if self.is_backward else runtime.forward
        width = shape.feed_forward_width / tensor
        active_width = shape.parts.active_experts * width
        bytes_per_token = (
            hidden * work.hidden_bytes / tensor + active_width * work.feed_forward_bytes
        )
        parts = shape.parts
        # Queries and the output, keys and values: less where they are guessed.
        scale = shape.attention_weights / (
            2 * hidden * (shape.query_width + shape.key_width) * tensor
        )
        layer = [
            *2 * [*self._products(hidden, scale * shape.query_width)],
            *2 * [*self._products(hidden, scale * shape.key_width)],
            *(3 if parts.is_gated else 2) * [*self._experts(width)],
            *self._attention(attention),
            self._memory_work(bytes_per_token, work.launches),
        ]
        end = [
            *self._products(
                hidden,
                shape.vocabulary / tensor,
                math.gcd(16, shape.vocabulary * PARAM_BYTES),
            ),
            self._memory_work(shape.vocabulary / tensor * work.vocabulary_bytes, 4),
        ]
        host_ns = (
            priors.ENGINE_OPERATION_NS
            if self.is_backward
            else priors.PYTHON_OPERATION_NS
        )
        layers = math.ceil(shape.layers / shape.parallel.pipeline)
        launches = layers * (work.launches + len(layer))
        gpu_ns = zip(_total(rates, layer), _total(rates, end), strict=True)
        ranges = zip(gpu_ns, host_ns, runtime.overhead, strict=True)
        return PriorRange(
            *(
                max(layers * a + b, launches * host) * over / 1e9
                for (a, b), host, over in ranges
            )
        )

    def _experts(self, width: float) -> Iterator[KernelWork]:
        """Yield the product of a feed-forward network, of all experts together."""
        parts = self.shape.parts
        rows = self.tokens * parts.active_experts / parts.experts
        for work in self._products(self.shape.hidden, width, rows=rows):
            assert isinstance(work.size, ProductSize)
            elements = parts.experts * work.size.result_elements
            yield replace(
                work,
                flops=parts.experts * work.flops,
                bytes=parts.experts * work.bytes,
                size=work.size._replace(result_elements=elements),
            )

    def _products(
        self,
        inputs: float,
        outputs: float,
        alignment_bytes: int = 16,
        rows: float | None = None,
    ) -> Iterator[KernelWork]:
        """Yield the product of a linear layer; in the backward the products for the
        gradients of its input and of its weights. `rows`: None: all tokens."""
        rows = self.tokens if rows is None else rows
        flops = 2 * rows * inputs * outputs
        size = 2 * (rows * inputs + inputs * outputs + rows * outputs)
        results = (
            (rows * inputs, inputs * outputs) if self.is_backward else (rows * outputs,)
        )
        for result in results:
            smallest, inner = min(rows, inputs, outputs), flops / 2 / result
            dimensions = ProductSize(result, smallest, inner, alignment_bytes)
            yield KernelWork(
                "mm",
                "compute",
                WorkClass.MATRIX,
                flops,
                size,
                self.precision,
                dimensions,
            )

    def _attention(self, kind: str) -> Iterator[KernelWork]:
        shape, sequence, head_size = (
            self.shape,
            self.shape.sequence,
            self.shape.head_size,
        )
        tensor = shape.parallel.tensor
        scores = self.tokens * sequence * shape.query_width / head_size / tensor
        flops = 2 * scores * head_size  # of one product of scores, all of them
        width = 2 * (shape.query_width + shape.key_width) / tensor
        moved = PARAM_BYTES * self.tokens * width * (1 + self.is_backward)
        if kind == MATH:
            yield self._memory_work(
                _SCORE_BYTES[self.is_backward] * scores / self.tokens, 3
            )
            dimensions = ProductSize(scores, min(head_size, sequence), head_size)
            bmm = KernelWork(
                "bmm",
                "compute",
                WorkClass.MATRIX,
                flops,
                moved + 2 * scores,
                self.precision,
                dimensions,
            )
            yield from [bmm] * (4 if self.is_backward else 2)
            return
        # Fused kernels leave out the half that a causal mask hides, and compute the
        # scores again in the backward.
        work_class = (
            WorkClass.ATTENTION_BACKWARD if self.is_backward else WorkClass.ATTENTION
        )
        flops *= (5 if self.is_backward else 2) / 2
        size = AttentionSize(sequence, head_size, kind)
        yield KernelWork(
            "attention", "compute", work_class, flops, moved, self.precision, size
        )

    def _memory_work(self, bytes_per_token: float, launches: int) -> KernelWork:
        size = self.tokens * bytes_per_token
        return KernelWork(
            "elementwise", "compute", WorkClass.ELEMENTWISE, 0, size, launches=launches
        )


def _total(rates: GpuRates, works: Iterable[KernelWork]) -> list[int]:
    return [
        sum(times)
        for times in zip(*(rates.kernel_ns(work) for work in works), strict=True)
    ]
