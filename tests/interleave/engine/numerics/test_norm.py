"""Sums of squares: they are right, and the kernel gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.numerics.fingerprint import fingerprint
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.norm import BLOCK, sum_of_squares, total
from tests.interleave.engine.states import DTYPES, any_bits

LENGTHS = st.integers(0, 1000) | st.sampled_from(
    [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 777, 5 * BLOCK]
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, CpuKernel]]:
    by_threads = {threads: CpuKernel(threads) for threads in (1, 3)}
    yield by_threads
    for kernel in by_threads.values():
        kernel.close()


def finite(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = any_bits(length, dtype, torch.Generator().manual_seed(seed))
    return torch.where(values.isfinite(), values, torch.ones((), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**31), length=LENGTHS, threads=st.sampled_from([1, 3]))
def test_kernel_sum_of_squares__gives_the_same_bits_with_any_number_of_threads(
    kernels: dict[int, CpuKernel],
    dtype: torch.dtype,
    seed: int,
    length: int,
    threads: int,
) -> None:
    gradient = finite(length, dtype, seed)
    assert kernels[threads].sum_of_squares(gradient) == sum_of_squares(gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares__is_the_sum_of_squares(dtype: torch.dtype) -> None:
    gradient = torch.randn(
        3 * BLOCK + 5, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    exact = math.fsum(value * value for value in gradient.double().tolist())
    assert sum_of_squares(gradient) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    length=st.integers(1, 3 * BLOCK),
    position=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
)
def test_sum_of_squares__is_finite_exactly_if_all_elements_are(
    kernels: dict[int, CpuKernel],
    dtype: torch.dtype,
    length: int,
    position: float,
    value: float,
) -> None:
    gradient = torch.full((length,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(kernels[3].sum_of_squares(gradient))
    gradient[int(position * length)] = value
    squares = kernels[3].sum_of_squares(gradient)
    assert not math.isfinite(squares)
    assert np.array_equal(squares, sum_of_squares(gradient), equal_nan=True)


@given(st.lists(st.floats(0, 1e300), max_size=20), st.randoms())
def test_total__does_not_depend_on_the_order(sums: list[float], random: object) -> None:
    shuffled = list(sums)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert total(shuffled) == total(sums)


def test_total__adds_sums_of_whole_blocks(kernels: dict[int, CpuKernel]) -> None:
    """A parameter may be too large for one pass; blocks add up exactly, while other
    sums of sums would round twice."""
    gradient = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(1))
    block_sums = [kernels[1].sum_of_squares(part) for part in gradient.split(BLOCK)]
    assert total(block_sums) == kernels[3].sum_of_squares(gradient)


def test_kernel_sums_of_squares__gives_those_of_each_gradient(
    kernels: dict[int, CpuKernel],
) -> None:
    lengths = (5, 0, 1023, 1024, 70_000, 1, *[3] * 2000)
    gradients = [
        finite(length, (torch.float32, torch.bfloat16)[seed % 7 == 0], seed)
        for seed, length in enumerate(lengths)
    ]
    sums = kernels[3].sums_of_squares(gradients)
    assert sums == [sum_of_squares(gradient) for gradient in gradients]
    assert kernels[1].fingerprints(gradients) == [
        fingerprint(gradient) for gradient in gradients
    ]
