"""Fingerprints: the same on every kernel, and another one after any change."""

from __future__ import annotations

import runpy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.numerics.fingerprint import BLOCK, fingerprint
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from tests.interleave.engine.states import DTYPES, any_bits

KERNEL = CpuKernel(1)
# A block has four times as many half-precision elements.
LENGTHS = [0, 1, 3, 4 * BLOCK, 9 * BLOCK + 7]


def values(length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return any_bits(length, dtype, torch.Generator().manual_seed(seed))


def test_kernel_fingerprint__equals_the_definition() -> None:
    for length in LENGTHS:
        for dtype in DTYPES:
            tensor = values(length + 1, dtype)
            for part in (tensor[:length], tensor[1:]):
                assert KERNEL.fingerprint(part) == fingerprint(part)


@given(st.sampled_from(DTYPES), st.sampled_from(LENGTHS[1:]), st.data())
def test_fingerprint__shows_the_change_of_any_bit(
    dtype: torch.dtype, length: int, data: st.DataObject
) -> None:
    tensor = values(length, dtype)
    before = KERNEL.fingerprint(tensor)
    words = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    bit = 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    words[data.draw(st.integers(0, length - 1))] ^= bit
    assert KERNEL.fingerprint(tensor) != before


CHANGES = [
    lambda tensor: tensor.neg_(),
    lambda tensor: tensor.copy_(tensor.flip(0)),
    lambda tensor: tensor.copy_(tensor.roll(1)),
    lambda tensor: tensor.copy_(tensor.roll(4 * BLOCK + 1)),
    lambda tensor: tensor.copy_(tensor.view(-1, 8).t().reshape(-1)),
    lambda tensor: tensor.mul_(0.5),
    lambda tensor: tensor.zero_(),
    lambda tensor: tensor.fill_(1.0),
]


def test_fingerprint__shows_changes_of_all_elements() -> None:
    for change in CHANGES:
        for dtype in DTYPES:
            for length in (16, BLOCK, 8 * BLOCK):
                tensor = torch.randn(
                    length, generator=torch.Generator().manual_seed(length)
                ).to(dtype)
                before = KERNEL.fingerprint(tensor)
                change(tensor)
                assert KERNEL.fingerprint(tensor) != before


@pytest.mark.parametrize("flipped", [2, 4, 8, 16, 64])
def test_fingerprint__shows_flipped_signs_at_any_distance(flipped: int) -> None:
    """Equal edits of the highest bit at equal distances, and pairs of opposite ones,
    cancel in many sums."""
    for distance in [2**power for power in range(15)]:
        tensor = torch.randn(
            16 * BLOCK, generator=torch.Generator().manual_seed(0)
        ).bfloat16()
        edited = tensor[: flipped * distance : distance]
        edited.abs_()
        edited[1::2].neg_()
        before = KERNEL.fingerprint(tensor)
        edited.neg_()
        assert KERNEL.fingerprint(tensor) != before


def test_fingerprint__has_two_sums_that_do_not_follow_from_each_other() -> None:
    """Among sums of so many tensors no two are equal: each sum has all of its 64
    bits."""
    words = torch.arange(4096, dtype=torch.int32)
    sums = [KERNEL.fingerprint(word.view(1).view(torch.float32)) for word in words]
    assert (
        len({text[:8] for text in sums})
        == len({text[8:] for text in sums})
        == len(sums)
    )


def test_fingerprint__has_other_keys_in_another_process() -> None:
    first, second = (
        runpy.run_path(fingerprint.__code__.co_filename)["KEYS"] for _ in range(2)
    )
    assert not (first == second).all()
