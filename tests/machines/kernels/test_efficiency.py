"""Shares of the peak by card, kernel and size."""

from __future__ import annotations

import math

import pytest

from ebbtide.machines.catalog import preset
from ebbtide.machines.kernels.efficiency import (
    CUDNN,
    FLASH_2,
    FLASH_3,
    PRODUCT,
    CardClass,
    RateShare,
    attention_factor,
    card_class_of,
    kernel_share,
    posterior,
    product_factor,
)
from ebbtide.machines.kernels.rates import AttentionSize, GpuRates, KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass
from ebbtide.machines.machine import GpuCompute


def test_posterior__weighs_by_precision_and_is_surer_than_each() -> None:
    both = posterior([RateShare(0.5, 0.1), RateShare(0.8, 0.2)])
    assert math.log(both.median) == pytest.approx(
        0.8 * math.log(0.5) + 0.2 * math.log(0.8)
    )
    assert both.error == pytest.approx(1 / math.sqrt(100 + 25))
    assert posterior([both]) == pytest.approx(both)


def test_kernel_share__is_wide_where_nothing_is_known() -> None:
    """A card that was measured is surest, then one of its class, then any other."""
    own = kernel_share(PRODUCT, "NVIDIA H100 80GB HBM3", CardClass.HOPPER)
    sibling = kernel_share(PRODUCT, "NVIDIA H800", CardClass.HOPPER)
    unknown = kernel_share(PRODUCT, "some card", CardClass.OTHER)
    assert own.error < sibling.error < unknown.error
    assert unknown.cases().fast / unknown.cases().slow < 2.2
    assert own.median == pytest.approx(0.695, rel=0.02)


PEAKS = [
    ("NVIDIA GeForce RTX 4090", "8.9", CardClass.GEFORCE),
    ("NVIDIA A100-SXM4-80GB", "8.0", CardClass.AMPERE),
    ("NVIDIA H100 PCIe", "9.0", CardClass.OTHER),
    ("NVIDIA H200", "9.0", CardClass.HOPPER),
    ("NVIDIA B200", "10.0", CardClass.BLACKWELL),
    ("AMD Instinct MI300X", None, CardClass.CDNA),
    ("NVIDIA A10", "8.6", CardClass.OTHER),
    (None, None, CardClass.OTHER),
]


def test_card_class_of__follows_what_the_peak_means() -> None:
    for name, capability, card_class in PEAKS:
        assert card_class_of(GpuCompute(name, capability)) is card_class


def test_product_factor__is_that_of_cubes_on_a100() -> None:
    """NVIDIA's figure: 88, 195, 235 and 258 TFLOP/s of at most 291, for cubes of 1024
    to 4096."""
    factors = [product_factor(size**2, size) for size in (1024, 2048, 3072, 4096)]
    assert factors == pytest.approx(
        [88 / 291, 195 / 291, 235 / 291, 258 / 291], abs=0.06
    )
    assert 0 < product_factor(8 * 64, 8) < product_factor(64 * 64, 64)
    assert (
        product_factor(4096**2, 4096, is_aligned=False)
        < product_factor(4096**2, 4096) / 3
    )


def test_attention_factor__falls_for_short_sequences_and_depends_on_heads() -> None:
    """On H100 FlashAttention 3 reaches 316 of 561 TFLOP/s in the backward of 512
    tokens; at 64 less than at 128."""
    assert attention_factor(512, 128, CardClass.HOPPER) == pytest.approx(
        316 / 561, abs=0.02
    )
    assert attention_factor(16_384, 64, CardClass.HOPPER) < attention_factor(
        16_384, 128, CardClass.HOPPER
    )
    assert attention_factor(16_384, 64, CardClass.GEFORCE) > attention_factor(
        16_384, 128, CardClass.GEFORCE
    )


def test_kernel_ns__of_attention_differs_by_implementation() -> None:
    """Measured on one H100, 16,384 tokens and heads of 128: 648, 595 and 370
    TFLOP/s."""
    rates = GpuRates(preset("h100-80gb"))

    def seconds(kind: str) -> float:
        work = KernelWork(
            "a",
            "compute",
            WorkClass.ATTENTION,
            1e13,
            0,
            "bfloat16",
            AttentionSize(16_384, 128, kind),
        )
        return rates.kernel_ns(work)[1] / 1e9

    measured = {FLASH_3: 648e12, CUDNN: 595e12, FLASH_2: 370e12}
    assert [1e13 / seconds(kind) for kind in measured] == pytest.approx(
        list(measured.values()), rel=0.07
    )
