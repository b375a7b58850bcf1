"""Shares of the peak by card, kernel and size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.machines.catalog import preset, presets
from ebbtide.machines.kernels.efficiency import (
    CUDNN,
    EFFICIENT,
    FLASH_2,
    FLASH_3,
    PRODUCT,
    AttentionSize,
    CardClass,
    ProductSize,
    RateShare,
    attention_factor,
    card_class_of,
    kernel_share,
    posterior,
    product_factor,
)
from ebbtide.machines.kernels.rates import GpuRates, KernelWork
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
    factors = [cube_factor(size) for size in (1024, 2048, 3072, 4096)]
    assert factors == pytest.approx(
        [88 / 291, 195 / 291, 235 / 291, 258 / 291], abs=0.06
    )
    tiny, small = ProductSize(8 * 64, 8), ProductSize(64 * 64, 64)
    assert 0 < product_factor(tiny) < product_factor(small)


def cube_factor(size: int, **changes: Any) -> float:
    """Return the share of the best rate of a product of three equal dimensions."""
    return product_factor(ProductSize(size**2, size, size)._replace(**changes))


def test_product_factor__falls_with_the_alignment_of_rows() -> None:
    """Odd rows of 2 B take 3 to 5 times as long, and those of 4 and 8 B less."""
    of_bytes = [cube_factor(4096, alignment_bytes=n) for n in (2, 4, 8, 16)]
    assert of_bytes == sorted(of_bytes)
    assert 3 <= of_bytes[3] / of_bytes[0] <= 5
    assert of_bytes[2] > of_bytes[3] / 2


def test_product_factor__of_a_long_inner_dimension_is_split() -> None:
    """A gradient of a small weight over many tokens fills the card, and one over few
    does not; a large result is not cut."""
    short, long = cube_factor(512), cube_factor(512, inner=65_536)
    assert long > 3 * short
    assert long <= product_factor(ProductSize(2 * 120 * 128 * 128, 512, 512))
    assert cube_factor(8192) == pytest.approx(cube_factor(8192, inner=65_536))


def test_product_factor__outside_of_matrix_units_needs_less() -> None:
    """Products in fp32 fill a card with smaller tiles, and need no alignment."""
    small = ProductSize(512 * 512, 64, 512, alignment_bytes=4)
    assert product_factor(small, plain=True) > 2 * product_factor(small)


def test_attention_factor__falls_for_short_sequences_and_depends_on_heads() -> None:
    """On H100 FlashAttention 3 reaches 316 of 561 TFLOP/s in the backward of 512
    tokens; at 64 less than at 128."""

    def factor(sequence: int, head: int, card: CardClass, kind: str = FLASH_3) -> float:
        return attention_factor(AttentionSize(sequence, head, kind), card)

    hopper, geforce = CardClass.HOPPER, CardClass.GEFORCE
    assert factor(512, 128, hopper) == pytest.approx(316 / 561, abs=0.02)
    assert factor(16_384, 64, hopper) < factor(16_384, 128, hopper)
    assert factor(16_384, 64, geforce) > factor(16_384, 128, geforce)
    # Heads of 80 run the kernel for 96.
    assert factor(4096, 80, hopper) < 0.9 * factor(4096, 96, hopper)
    assert factor(4096, 64, hopper, EFFICIENT) < 0.6 * factor(4096, 64, hopper)


_SIZES = st.one_of(
    st.none(),
    st.builds(
        ProductSize,
        st.floats(1, 1e9),
        st.floats(2, 1e5),
        st.floats(1, 1e6),
        st.sampled_from([1, 2, 4, 8, 16]),
        st.floats(1, 2.25),
    ),
    st.builds(
        AttentionSize,
        st.floats(1, 1e5),
        st.integers(8, 512),
        st.sampled_from([FLASH_2, FLASH_3, CUDNN, EFFICIENT]),
    ),
)
_WORKS = st.builds(
    KernelWork,
    st.just("kernel"),
    st.just("compute"),
    st.sampled_from([kind for kind in WorkClass if kind is not WorkClass.COLLECTIVE]),
    st.floats(0, 1e15),
    st.floats(0, 1e12),
    st.sampled_from(["float32", "tf32", "float16", "bfloat16", "float8"]),
    _SIZES,
    copied_bytes=st.floats(0, 1e12),
)


@given(st.sampled_from(presets()), _WORKS)
def test_kernel_ns__is_never_below_the_limits_of_the_card(
    name: str, work: KernelWork
) -> None:
    """No kernel of any kind exceeds the rate of device memory, or the peak at the
    highest clock of the card by the operations that it computes, in any case."""
    rates = GpuRates(preset(name))
    limit = 1.25 if "GeForce" in (rates.gpu.name or "") else 1.0
    by_flops = work.flops / rates.peak(work.precision) / limit
    if work.work_class not in _COMPUTING:
        by_flops = 0.0
    copied = work.copied_bytes / (rates.gpu.memory_bytes_per_s or 1.0)
    if work.work_class is WorkClass.CONVOLUTION and work.precision == "float32":
        copied = 0.0
        if isinstance(work.size, ProductSize):
            by_flops /= work.size.reduction
    by_bytes = work.bytes / (rates.gpu.memory_bytes_per_s or 1.0)
    fast, typical, slow = rates.kernel_ns(work)
    assert fast >= 1e9 * (max(by_flops, by_bytes) + copied)
    assert fast <= typical <= slow


_COMPUTING = {
    WorkClass.MATRIX,
    WorkClass.CONVOLUTION,
    WorkClass.DEPTHWISE,
    WorkClass.ATTENTION,
    WorkClass.ATTENTION_BACKWARD,
}


_V100 = GpuCompute(
    "Tesla V100-SXM2-32GB",
    "7.0",
    {"float32": 15.7e12, "float16": 125e12},
    memory_bytes_per_s=900e9,
)


def convolution_s(precision: str, gpu: GpuCompute = _V100, **size: Any) -> float:
    """Return the typical time of a large convolution of 1 TFLOP."""
    machine = replace(preset("a100-80gb-sxm"), gpu=gpu)
    own = ProductSize(1e8, 512, 4608)._replace(**size)
    work = KernelWork(
        "c",
        "compute",
        WorkClass.CONVOLUTION,
        1e12,
        1e6,
        precision,
        own,
        copied_bytes=4e9,
    )
    return GpuRates(machine).kernel_ns(work)[1] / 1e9


def test_kernel_ns__of_a_type_that_a_card_lacks_is_that_of_the_next_one() -> None:
    """torch asks for TF32 in convolutions by default. V100 has none: it computes in
    fp32, by its kernels, which copy nothing into another layout."""
    assert convolution_s("tf32") == convolution_s("float32") < 0.13
    assert convolution_s("float16") > 4e9 / 900e9


def test_kernel_ns__of_winograds_algorithm_is_shorter_in_fp32_alone() -> None:
    """cuDNN's kernels reach 0.44 of the peak or more on V100, of the operations that
    are left; tensor cores do not run the algorithm."""
    direct, reduced = convolution_s("float32"), convolution_s("float32", reduction=2.25)
    assert direct == pytest.approx(2.25 * reduced, rel=0.01)
    assert 0.44 < 1e12 / 2.25 / 15.7e12 / reduced < 0.93
    assert convolution_s("float16", reduction=2.25) == convolution_s("float16")


def test_kernel_ns__of_convolutions_on_geforce_cards_is_that_of_products() -> None:
    """Shared memory feeds their tensor cores, which have a quarter of the operations of
    A100's for each byte of it."""
    size = ProductSize(1e8, 512, 4608)

    def over_product(name: str, precision: str) -> float:
        kinds = (WorkClass.CONVOLUTION, WorkClass.MATRIX)
        works = [
            KernelWork("c", "compute", k, 1e12, 1e6, precision, size) for k in kinds
        ]
        convolution, product = (GpuRates(preset(name)).kernel_ns(w)[1] for w in works)
        return convolution / product

    assert over_product("rtx3090", "float16") == pytest.approx(1.0)
    assert over_product("rtx3090", "float32") == pytest.approx(1 / 0.7, rel=0.01)
    assert over_product("a100-80gb-sxm", "float16") == pytest.approx(1 / 0.7, rel=0.01)


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
