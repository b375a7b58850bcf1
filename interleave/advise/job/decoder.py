"""The kernels of a decoder: what a forward and a backward compute, timed as a dry run times them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ebbtide.errors import WorkloadError
from ebbtide.machines.machine import Machine
from ebbtide.profiler.dryrun.time import time_priors as priors
from ebbtide.profiler.dryrun.time.efficiency import CUDNN, FLASH_2, FLASH_3
from ebbtide.profiler.dryrun.time.rates import AttentionSize, GpuRates, KernelWork, ProductSize
from ebbtide.profiler.dryrun.time.time_priors import CASES, PriorRange, WorkClass

# Published decoders from 1e9 to 1e11 parameters have about this width per layer (GPT-3 6.7B: 128, Llama 65B: 102).
_WIDTH_PER_LAYER = 128
# Weights of a layer: 4 h^2 of attention and 8 h^2 of the feed-forward network.
_ATTENTION_WEIGHTS, _LAYER_WEIGHTS = 4, 12
# Bytes per token and hidden unit that a layer keeps for the backward, in half precision, without attention scores;
# and its input alone, which full checkpointing keeps. Korthikanti et al. 2022, "Reducing Activation Recomputation in
# Large Transformer Models", equation 1 and section 5, where fused attention keeps no scores.
_LAYER_BYTES = 34
_CHECKPOINT_BYTES = 2
# Bytes per token and entry of the vocabulary: logits in fp32, and their gradients.
_LOGIT_BYTES = 4
# Wider models have heads of 128, others of 64 (GPT-2, Llama 3.2 1B; Llama 3.2 3B).
_WIDE = 3072
# Attention whose scores are in device memory: by products of matrices, and a softmax.
MATH = "math"
ATTENTION = (FLASH_2, FLASH_3, CUDNN, MATH)


class ElementwiseWork(NamedTuple):
    """Work of a layer beside products and attention, in one direction.

    Bytes per token of device memory that are read and written: for each hidden unit, each unit of the feed-forward
    network, and each entry of the vocabulary (once for the model); and launches.
    """

    hidden_bytes: float
    feed_forward_bytes: float
    vocabulary_bytes: float
    launches: int


class Runtime(NamedTuple):
    """What runs a job.

    Attributes:
        overhead: The time of a step over that of its kernels: gaps between them, waits for other ranks, data.
        is_likely: Whether a job of which nothing is known may be of this kind.
        hides_exchanges: Whether exchanges with other ranks overlap with compute; None: not known how far.
    """

    forward: ElementwiseWork
    backward: ElementwiseWork
    overhead: PriorRange
    is_likely: bool = True
    hides_exchanges: bool | None = None


# Fused kernels (torch.compile, Liger, Megatron's), or operation by operation: norms with copies in fp32, rotations of
# queries and keys, residual sums, the activation; the loss with logits in fp32. Shares of the peak were fitted to a job
# of the first kind; plain PyTorch reaches 0.33 to 0.39 of an H100 in training Llama 3 8B (torchtitan). ZeRO-3 of
# DeepSpeed hides neither exchanges nor copies of gradients in fp32 (traces/, h100-20b and a100-13b).
RUNTIMES = {
    "fused": Runtime(ElementwiseWork(16, 6, 4, 20), ElementwiseWork(30, 18, 6, 40), PriorRange(1.0, 1.0, 1.08)),
    "eager": Runtime(ElementwiseWork(70, 10, 14, 45), ElementwiseWork(140, 20, 18, 90), PriorRange(1.0, 1.12, 1.3)),
    "deepspeed": Runtime(
        ElementwiseWork(40, 8, 9, 45), ElementwiseWork(80, 19, 12, 90), PriorRange(0.95, 1.06, 1.25), False, False
    ),
}
# Bytes of a score of attention that a fused softmax moves, forward and backward, where scores are in device memory.
_SCORE_BYTES = 4, 6


@dataclass(frozen=True)
class Implementation:
    """What a job computes with: one of `RUNTIMES`, and of `ATTENTION`; None: not stated, so times span the likely ones.

    `offloaded_share`: the share of the gradients that is copied to the host.
    """

    runtime: str | None = None
    attention: str | None = None
    offloaded_share: float = 1.0

    @property
    def text(self) -> str:
        """The implementation in words."""
        return f"runtime {self.runtime or 'fused or eager'}, attention {self.attention or 'any fused one'}"

    def choices(self, rates: GpuRates) -> Iterator[tuple[Runtime, str]]:
        """Yield the runtimes and kinds of attention that the job may have on a GPU."""
        likely = [runtime for runtime in RUNTIMES.values() if runtime.is_likely]
        attention = [self.attention] if self.attention else rates.fused_attention
        return product([RUNTIMES[self.runtime]] if self.runtime else likely, attention)

    @property
    def hides_exchanges(self) -> bool | None:
        """Whether exchanges with other ranks overlap with compute; None: not known how far."""
        return RUNTIMES[self.runtime].hides_exchanges if self.runtime else None


NOT_STATED = Implementation()


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a decoder."""

    params: int
    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    head_size: int = 128

    @property
    def layer_params(self) -> float:
        """Parameters of a layer."""
        return self.params / self.layers

    @property
    def layer_weights(self) -> float:
        """Weights of the products of a layer: without embeddings, of which small models have one for both ends."""
        embedding = self.vocabulary * self.hidden
        tied = self.params - 2 * embedding < _TIED * _LAYER_WEIGHTS * self.layers * self.hidden**2
        return max(self.params - embedding * (1 if tied else 2), 0.1 * self.params) / self.layers

    def forward_flops(self, tokens: float) -> float:
        """Return the operations of a forward; a backward has twice as many.

        2 per weight and token, and for causal attention 2 layers x hidden x sequence per token.
        """
        weights = self.layers * self.layer_weights + self.vocabulary * self.hidden
        return tokens * 2.0 * (weights + self.layers * self.hidden * self.sequence)

    def kept_bytes(self, tokens: float, checkpointing: bool) -> float:
        """Return the bytes of activations that a forward over `tokens` tokens keeps, without the logits."""
        return tokens * self.hidden * self.layers * (_CHECKPOINT_BYTES if checkpointing else _LAYER_BYTES)

    def layer_bytes(self, tokens: float) -> float:
        """Return the bytes of activations of one layer, which checkpointing computes again in the backward."""
        return tokens * self.hidden * _LAYER_BYTES

    def logit_bytes(self, tokens: float) -> float:
        """Return the bytes of the logits; their gradients take as many."""
        return tokens * self.vocabulary * _LOGIT_BYTES


# With less than this share of 12 h^2 a layer besides two embeddings, a model has one embedding.
_TIED = 0.85


def checkpointed_share(params: int) -> float:
    """Return the share of a decoder's activations that remains with full checkpointing: inputs, and one layer."""
    layers = guessed_layers(params)
    return min(1.0, _CHECKPOINT_BYTES / _LAYER_BYTES + 1 / layers)


def guessed_layers(params: int) -> int:
    """Return the layers of a decoder of usual proportions, 128 hidden units per layer: params = 12 layers hidden^2."""
    return max(1, round(math.cbrt(params / (_LAYER_WEIGHTS * _WIDTH_PER_LAYER**2))))


def shape_of(
    params: int,
    sequence: int,
    vocabulary: int,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
) -> TransformerShape:
    """Return the shape of a decoder; what is not given follows from params = 12 layers hidden^2."""
    if params < 1:
        raise WorkloadError("--params must be at least 1")
    if layers is None:
        layers = guessed_layers(params) if hidden is None else max(1, round(params / (_LAYER_WEIGHTS * hidden**2)))
    if hidden is None:
        hidden = max(1, round(math.sqrt(params / (_LAYER_WEIGHTS * layers))))
    head_size = max(1, hidden // heads) if heads else 128 if hidden >= _WIDE else 64
    return TransformerShape(params, layers, hidden, vocabulary, sequence, head_size)


class ComputeSpan(NamedTuple):
    """Times of a forward and of a backward without recomputation, s, in each of the cases."""

    forward_s: PriorRange
    backward_s: PriorRange


def compute_span(
    shape: TransformerShape, tokens: float, machine: Machine, precision: str, implementation: Implementation
) -> ComputeSpan:
    """Return the times of one micro-step of `tokens` tokens, fast, typical and slow.

    Where the implementation is not known, the ends are those of all that are possible, and the typical time is their
    geometric mean.
    """
    rates = GpuRates(machine)
    spans = [_span(shape, tokens, rates, precision, *choice) for choice in implementation.choices(rates)]
    return ComputeSpan(*(_union([span[phase] for span in spans]) for phase in range(2)))


def _union(times: list[PriorRange]) -> PriorRange:
    typical = math.exp(sum(math.log(time.typical) for time in times) / len(times))
    return PriorRange(min(time.fast for time in times), typical, max(time.slow for time in times))


def _span(
    shape: TransformerShape, tokens: float, rates: GpuRates, precision: str, runtime: Runtime, attention: str
) -> tuple[PriorRange, PriorRange]:
    spans = []
    for backward, elementwise in enumerate((runtime.forward, runtime.backward)):
        host = priors.ENGINE_OPERATION_NS if backward else priors.PYTHON_OPERATION_NS
        layer = [*_layer(shape, tokens, precision, attention, bool(backward)), _elementwise(shape, tokens, elementwise)]
        head = _products(tokens, shape.hidden, shape.vocabulary, precision, bool(backward))
        loss = tokens * shape.vocabulary * elementwise.vocabulary_bytes
        gpu = [
            shape.layers * in_layer + at_end
            for in_layer, at_end in zip(
                _total(rates, layer), _total(rates, [*head, _memory_work(loss, 4)]), strict=True
            )
        ]
        launches = shape.layers * (elementwise.launches + len(layer))
        # The host runs ahead of the GPU, or the GPU waits for launches.
        times = [max(gpu[case], launches * host[case]) * runtime.overhead[case] / 1e9 for case in range(len(CASES))]
        spans.append(PriorRange(*times))
    return spans[0], spans[1]


def _total(rates: GpuRates, works: Iterable[KernelWork]) -> list[int]:
    return [sum(times) for times in zip(*(rates.kernel_ns(work) for work in works), strict=True)]


def _layer(
    shape: TransformerShape, tokens: float, precision: str, attention: str, backward: bool
) -> Iterator[KernelWork]:
    """Yield the products of a layer, and its attention; what remains of 12 h^2 is a gated feed-forward network."""
    hidden, weights = shape.hidden, shape.layer_weights
    of_attention = min(_ATTENTION_WEIGHTS * hidden**2, 0.5 * weights)
    for _ in range(_ATTENTION_WEIGHTS):
        yield from _products(tokens, hidden, of_attention / hidden / _ATTENTION_WEIGHTS, precision, backward)
    for _ in range(3):
        yield from _products(tokens, hidden, feed_forward_width(shape), precision, backward)
    yield from _attention(shape, tokens, precision, attention, backward)


def feed_forward_width(shape: TransformerShape) -> float:
    """Return the width of a gated feed-forward network with the weights that attention leaves."""
    weights = shape.layer_weights
    return max(weights - _ATTENTION_WEIGHTS * shape.hidden**2, 0.5 * weights) / 3 / shape.hidden


def _products(tokens: float, inputs: float, outputs: float, precision: str, backward: bool) -> Iterator[KernelWork]:
    """Yield the product of a linear layer; in the backward those of its input's and of its weights' gradients."""
    flops = 2 * tokens * inputs * outputs
    size = 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
    smallest = min(tokens, inputs, outputs)
    for result in (tokens * inputs, inputs * outputs) if backward else (tokens * outputs,):
        yield KernelWork("mm", "compute", WorkClass.MATRIX, flops, size, precision, ProductSize(result, smallest))


def _attention(
    shape: TransformerShape, tokens: float, precision: str, attention: str, backward: bool
) -> Iterator[KernelWork]:
    scores = tokens * shape.sequence * shape.hidden / shape.head_size
    flops = 2 * scores * shape.head_size  # of one product of scores, all of them
    moved = 8.0 * tokens * shape.hidden * (2 if backward else 1)
    if attention != MATH:
        # Fused kernels leave out the half that a causal mask hides, and compute the scores again in the backward.
        work_class = WorkClass.ATTENTION_BACKWARD if backward else WorkClass.ATTENTION
        count, size = (5 if backward else 2), AttentionSize(shape.sequence, shape.head_size, attention)
        yield KernelWork("attention", "compute", work_class, count * flops / 2, moved, precision, size)
        return
    yield _memory_work(_SCORE_BYTES[backward] * scores, 3)
    for _ in range(4 if backward else 2):
        size = ProductSize(scores, min(shape.head_size, shape.sequence))
        yield KernelWork("bmm", "compute", WorkClass.MATRIX, flops, moved + 2 * scores, precision, size)


def _elementwise(shape: TransformerShape, tokens: float, work: ElementwiseWork) -> KernelWork:
    per_token = shape.hidden * work.hidden_bytes + feed_forward_width(shape) * work.feed_forward_bytes
    return _memory_work(tokens * per_token, work.launches)


def _memory_work(size: float, launches: int) -> KernelWork:
    return KernelWork("elementwise", "compute", WorkClass.ELEMENTWISE, 0, size, launches=launches)
