"""Shares of the rates of its data sheet that a GPU reaches by card, kernel and size,
for dry runs and for plans.

A share is a posterior: a prior for any card, corrected by what others measured on this
card and, trusted less, on cards of its class. Errors are standard errors of the
logarithm. `EVIDENCE` is all that the shares rest on:

- Best shape of a product in bfloat16: Bekman, "Machine Learning Engineering", table of
  maximum achievable matmul FLOPS (2026-08-22); RTX 5090:
  main-horse.github.io/posts/5090-mm-perf. Jobs reach less: real data take more power,
  and not every shape is the best one.
- Jobs: Llama of 8 B on H100 and RTX 3090 (als244/ml_dataflow, 428 runs), and
  traces/a100-ranks1-async.ebb. Attention on A100 and RTX 3090, and products and
  attention on RTX 5090: the fits of docs/validation.md, which count all kernels.
- Attention, long sequences, heads of 128: FlashAttention-2 on A100 (Dao 2023);
  FlashAttention-2, FlashAttention-3 and cuDNN on H100 (Shah et al. 2024, figures 5 and
  6); RTX 5090: F.sdpa at 400 W (gau-nernst, "Writing Speed-of-Light Flash Attention for
  5090"), whose backward was not measured.
"""

import math
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import NamedTuple

from ebbtide.machines.kernels.time_priors import PriorRange
from ebbtide.machines.machine import GpuCompute

# Standard normal deviates of the ends of a range with a probability of 80 %.
DEVIATIONS_OF_RANGE = 1.2816


class CardClass(Enum):
    """Classes of GPUs whose data sheets mean the same by a peak."""

    GEFORCE = "GeForce: the peak with sums in fp32, at a clock that cards exceed"
    AMPERE = "data center, compute capability 8.0"
    HOPPER = "data center, compute capability 9"
    BLACKWELL = "data center, compute capability 10"
    CDNA = "AMD Instinct"
    OTHER = "others, and those whose power does not sustain the clock of the peak"


class RateShare(NamedTuple):
    """A share of a data sheet's rate: its median, and one standard error of its
    logarithm."""

    median: float
    error: float

    def cases(self, factor: float = 1.0) -> PriorRange:
        """Return the share times a factor in each of the cases, which end a range with
        a probability of 80 %."""
        side = math.exp(DEVIATIONS_OF_RANGE * self.error)
        return PriorRange(*(factor * self.median * side**sign for sign in (1, 0, -1)))


class Evidence(NamedTuple):
    """A measured share, and its error. `gpu`: part of the GPU's name, as torch reports
    it."""

    kernel: str
    gpu: str
    card_class: CardClass
    share: float
    error: float


PRODUCT, FLASH_2, FLASH_3, CUDNN = "product", "flash2", "flash3", "cudnn"
EFFICIENT = "efficient"  # torch's memory-efficient attention, made of CUTLASS
# A job differs by so much from others on the same card (clocks, versions, shapes), and
# a card from others of its class. Attention in jobs reached 0.87 (A100, RTX 5090) to
# 0.98 (H100) of what the same kernels reach alone.
_JOBS, _ATTENTION_JOBS, _CARDS = 0.1, 0.15, 0.08
# The share of its best shape that a product of a job reaches: 0.86 on H100, 0.88 on
# A100.
_IN_JOB = 0.87
_BEST_ERROR = 0.07
_PRIORS = {
    PRODUCT: RateShare(0.7, 0.2),
    FLASH_2: RateShare(0.5, 0.3),
    FLASH_3: RateShare(0.6, 0.2),
    CUDNN: RateShare(0.6, 0.2),
}
EVIDENCE = (
    Evidence(PRODUCT, "RTX 3090", CardClass.GEFORCE, 1.0, 0.04),
    Evidence(PRODUCT, "RTX 5090", CardClass.GEFORCE, 1.07 * _IN_JOB, 0.1),
    Evidence(PRODUCT, "RTX 5090", CardClass.GEFORCE, 1.14, 0.1),
    Evidence(PRODUCT, "A100-SXM", CardClass.AMPERE, 0.869 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "A100-PCIE", CardClass.AMPERE, 0.811 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "H100 80GB HBM3", CardClass.HOPPER, 0.695, 0.04),
    Evidence(PRODUCT, "H200", CardClass.HOPPER, 0.803 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "GH200", CardClass.HOPPER, 0.838 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "B200", CardClass.BLACKWELL, 0.776 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "B300", CardClass.BLACKWELL, 0.786 * _IN_JOB, _BEST_ERROR),
    Evidence(PRODUCT, "MI300X", CardClass.CDNA, 0.514 * _IN_JOB, 0.12),
    Evidence(PRODUCT, "MI325X", CardClass.CDNA, 0.604 * _IN_JOB, 0.12),
    Evidence(PRODUCT, "MI355X", CardClass.CDNA, 0.68 * _IN_JOB, 0.12),
    Evidence(FLASH_2, "A100", CardClass.AMPERE, 0.72, _ATTENTION_JOBS),
    Evidence(FLASH_2, "A100", CardClass.AMPERE, 0.63, 0.15),
    Evidence(FLASH_2, "RTX 3090", CardClass.GEFORCE, 1.0, 0.1),
    Evidence(FLASH_2, "RTX 5090", CardClass.GEFORCE, 0.75, 0.15),
    Evidence(FLASH_2, "RTX 5090", CardClass.GEFORCE, 0.65, 0.15),
    Evidence(FLASH_2, "H100", CardClass.HOPPER, 0.374, 0.04),
    Evidence(FLASH_3, "H100", CardClass.HOPPER, 0.655, 0.05),
    Evidence(FLASH_3, "H100 80GB HBM3", CardClass.HOPPER, 0.72, 0.05),
    Evidence(CUDNN, "H100", CardClass.HOPPER, 0.601, 0.05),
    Evidence(CUDNN, "RTX 5090", CardClass.GEFORCE, 0.8, 0.15),
)
# Products in other types, as a share of that in half precision (the same table; A100:
# NVIDIA's figure for cubes).
OTHER_TYPES = {"float8": 0.92, "tf32": 0.93}
# A backward of attention over its forward: 0.86 to 0.87 of the rate on A100 and H100.
BACKWARD_OF_ATTENTION = 0.87
# FlashAttention-2 takes 0.5 to 0.6 of the time of xformers' kernel, which torch has as
# its memory-efficient one (A100, sequences from 2,048 on; Dao 2023, figures 4 to 6).
_EFFICIENT_OF_FLASH_2 = 0.55
# Elements of the result that all processors work on at a time: 120 tiles of 128 x 128.
# A product of n such waves has the share n / (n + 1) of its rate. On A100 (NVIDIA,
# figure for cubes) that gives 0.35, 0.68, 0.83 and 0.90 of the best rate for 1024,
# 2048, 3072 and 4096; measured are 0.30, 0.67, 0.81 and 0.89. Below one wave tiles get
# smaller.
_WAVE_ELEMENTS = 120 * 128 * 128
# A result of few tiles with a long inner dimension is cut along that dimension, too
# (split-K of cuBLAS and CUTLASS, "Efficient GEMM"), so that up to so many waves are
# filled by pieces of at least so many inner elements.
_SPLIT_WAVES, _SPLIT_LENGTH = 2, 1024
# One whose smallest dimension is d reaches d / (d + 32) of this: its tiles are not
# filled.
_SMALL_DIMENSION = 32
# Outside of the matrix units a tile of a 16th of the elements, 32 x 32, keeps a
# processor as busy: these units take 8 (A100, RTX 4090) to 16 times as long (H100).
_PLAIN_TILE_SHARE = 1 / 16
# Without rows at multiples of 16 B, other kernels are taken. With odd rows of 2 B they
# take 3 times the time (vocabulary of 128,003; Netflix 2026, "Scaling LLM
# Post-Training") to 5 times (GPT-2 with 50,257 on H200, with the loss;
# benchmarks/accuracy). Between, at 4 and 8 B, interpolated: loads are as many times as
# long.
_ALIGNMENT_BYTES, _LEAST_ALIGNMENT, _NOT_ALIGNED = 16, 2, 0.25
# Convolutions over products of their size, by class. A multiprocessor of a GeForce card
# has a quarter of the operations of A100's for each byte of shared memory (256 of 1,024
# with sums in fp32 a clock, 128 B; whitepapers of GA102 and A100), which feeds them as
# it feeds products (timm's table on RTX 3090, Lambda's on RTX 3090 and 4090).
CONVOLUTIONS = {CardClass.GEFORCE: PriorRange(1.1, 1.0, 0.8)}
# Cards run above the clock of their data sheet's peak by at most this: RTX 3090 2,100
# instead of 1,695 MHz (`nvidia-smi -q`: Max Clocks). Others do not: their power limits
# them.
_CLOCK_LIMITS = {CardClass.GEFORCE: 1.25}
# Heads for which FlashAttention has kernels; others run the next larger one.
_FLASH_HEADS = (32, 64, 96, 128, 160, 192, 256)
# Attention over sequences of s reaches s / (s + 400): FlashAttention-3 and cuDNN on
# H100, 512 to 16,384.
_SHORT_SEQUENCE = 400
# Smaller heads: the rate at 64 is 0.77 (FlashAttention-3), 0.87 (2) and 0.69 (cuDNN) of
# that at 128 on H100, and on A100 0.9 alone and 1.0 in jobs (ml_dataflow). On GeForce
# cards, whose shared memory is small, heads of 128 are the slower ones: 0.73 (RTX 5090,
# ml_dataflow).
_FULL_HEAD, _HEAD_EXPONENT = 128, 0.35
_HEAD_EXPONENTS = {CardClass.AMPERE: 0.1, CardClass.GEFORCE: -0.4}


@cache
def kernel_share(kernel: str, name: str, card_class: CardClass) -> RateShare:
    """Return the share that a kernel reaches in large sizes on a GPU.

    The GPU has a name and a class.
    """
    used = [_PRIORS[kernel]]
    for evidence in EVIDENCE:
        if evidence.kernel == kernel and evidence.card_class is card_class:
            own = evidence.gpu in name and not name.startswith(f"G{evidence.gpu}")
            used.append(
                RateShare(
                    evidence.share,
                    evidence.error if own else math.hypot(evidence.error, _CARDS),
                )
            )
    share = posterior(used)
    return RateShare(
        share.median,
        math.hypot(share.error, _JOBS if kernel == PRODUCT else _ATTENTION_JOBS),
    )


def posterior(shares: Iterable[RateShare]) -> RateShare:
    """Return what independent estimates of a share, normal in the logarithm, give
    together."""
    weights = [(1 / share.error**2, math.log(share.median)) for share in shares]
    total = sum(weight for weight, _ in weights)
    return RateShare(
        math.exp(sum(weight * value for weight, value in weights) / total), total**-0.5
    )


def card_class_of(gpu: GpuCompute) -> CardClass:
    """Return the class of a GPU by its name and compute capability."""
    name, capability = gpu.name or "", gpu.compute_capability or ""
    if "GeForce" in name:
        return CardClass.GEFORCE
    if "Instinct" in name:
        return CardClass.CDNA
    if capability.startswith("9.") and "PCIe" in name:
        return CardClass.OTHER
    by_capability = {
        "8.0": CardClass.AMPERE,
        "9.0": CardClass.HOPPER,
        "10.0": CardClass.BLACKWELL,
    }
    return by_capability.get(capability, CardClass.OTHER)


def peak_limit(card_class: CardClass) -> float:
    """Return the share of a data sheet's peak that no kernel of a GPU exceeds."""
    return _CLOCK_LIMITS.get(card_class, 1.0)


class ProductSize(NamedTuple):
    """The size of a matrix product, or of a convolution as one."""

    result_elements: float
    smallest_dimension: float
    inner: float = 0.0  # Elements of each sum; 0: not known.
    # Rows of all matrices begin at multiples of so many bytes.
    alignment_bytes: int = _ALIGNMENT_BYTES
    # Of a convolution outside of the matrix units, its operations over those that
    # Winograd's algorithm has left; 1: it does not apply.
    reduction: float = 1.0


def product_factor(size: ProductSize, *, plain: bool = False) -> float:
    """Return the share of large products' rate that one of this size reaches.

    `plain`: outside of the matrix units, which need no alignment.
    """
    scale = _PLAIN_TILE_SHARE if plain else 1.0
    waves = size.result_elements / _WAVE_ELEMENTS / scale
    split = min(_SPLIT_WAVES, waves * size.inner / _SPLIT_LENGTH)
    waves = max(waves, split)
    filled = waves / (waves + 1) if waves > 1 else math.sqrt(waves) / 2
    unfilled = _SMALL_DIMENSION * math.sqrt(scale)
    factor = filled * size.smallest_dimension / (size.smallest_dimension + unfilled)
    return factor if plain else factor * _alignment_factor(size.alignment_bytes)


def _alignment_factor(alignment_bytes: int) -> float:
    aligned = max(alignment_bytes, _LEAST_ALIGNMENT) / _ALIGNMENT_BYTES
    exponent = math.log(_NOT_ALIGNED, _LEAST_ALIGNMENT / _ALIGNMENT_BYTES)
    return math.pow(min(1.0, aligned), exponent)


class AttentionSize(NamedTuple):
    """The size of attention, and its implementation."""

    sequence: float
    head_size: float
    implementation: str = FLASH_2


def attention_factor(size: AttentionSize, card_class: CardClass) -> float:
    """Return the share of the rate on long sequences and heads of 128 that attention of
    this size reaches."""
    exponent = _HEAD_EXPONENTS.get(card_class, _HEAD_EXPONENT)
    heads = math.pow(min(1.0, size.head_size / _FULL_HEAD), exponent)
    factor = size.sequence / (size.sequence + _SHORT_SEQUENCE) * heads
    if size.implementation == EFFICIENT:
        return factor * _EFFICIENT_OF_FLASH_2
    kernels = (head for head in _FLASH_HEADS if head >= size.head_size)
    return factor * size.head_size / next(kernels, size.head_size)
