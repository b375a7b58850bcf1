"""The reference: its rounding compared with torch, a step compared with
torch.optim.AdamW."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.reference import (
    BFLOAT16_NAN,
    FLOAT16_NAN,
    NAN,
    bfloat16_bits,
    float16_bits,
)
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.states import arguments

ROUNDINGS = pytest.mark.parametrize(
    ("rounded", "half"),
    [(bfloat16_bits, torch.bfloat16), (float16_bits, torch.float16)],
)


@ROUNDINGS
def test_rounding__equals_that_of_torch_at_all_ties(
    rounded: object, half: torch.dtype
) -> None:
    # All upper halves, with lower bits at, next to and between the ties of both
    # precisions.
    low = [
        0,
        1,
        0x0FFF,
        0x1000,
        0x1001,
        0x1FFF,
        0x2000,
        0x3000,
        0x7000,
        0x7FFF,
        0x8000,
        0x8001,
        0xFFFF,
    ]
    patterns = (
        np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    ) | np.array(low, np.uint32)
    values = patterns.reshape(-1).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(half).view(torch.uint16).numpy()
    np.testing.assert_array_equal(rounded(values), expected)  # type: ignore[operator]


@ROUNDINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_rounding__equals_that_of_torch_for_random_numbers(
    rounded: object, half: torch.dtype, seed: int
) -> None:
    patterns = np.random.default_rng(seed).integers(0, 2**32, 10_000, np.uint32)
    values = patterns.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(half).view(torch.uint16).numpy()
    np.testing.assert_array_equal(rounded(values), expected)  # type: ignore[operator]


def test_rounding__keeps_nan() -> None:
    nan = np.array(
        [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000], np.uint32
    ).view(np.float32)
    assert set(bfloat16_bits(nan)) == {BFLOAT16_NAN}
    assert set(float16_bits(nan)) == {FLOAT16_NAN}
    assert (
        torch.tensor([BFLOAT16_NAN], dtype=torch.uint16)
        .view(torch.bfloat16)
        .isnan()
        .all()
    )
    assert (
        torch.tensor([FLOAT16_NAN], dtype=torch.uint16)
        .view(torch.float16)
        .isnan()
        .all()
    )


@pytest.mark.parametrize("index", range(4))
def test_update__stores_one_nan_for_nan_in_any_input(index: int) -> None:
    for pattern in (0x7FFFFFFF, -1, 0x7F800001):
        tensors = [torch.ones(3) for _ in range(5)]
        tensors[index] = torch.full((3,), pattern, dtype=torch.int32).view(
            torch.float32
        )
        reference.update(*arguments(tensors), Hyper().scalars(1))
        _, master, first, second, out = (
            set(tensor.view(torch.int32).tolist()) for tensor in tensors
        )
        assert master == out == {NAN}
        assert (first == {NAN}, second == {NAN}) == {
            0: (True, True),
            2: (True, False),
            3: (False, True),
        }.get(index, (False, False))


def test_scalars__are_rounded_once_from_double() -> None:
    scalars = Hyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1).scalars(
        7, scale=0.3
    )
    assert scalars == tuple(
        map(
            np.float32,
            (
                0.3,
                0.9,
                1 - 0.9,
                0.95,
                1 - 0.95,
                1 - 3e-5,
                3e-4 / (1 - 0.9**7),
                (1 - 0.95**7) ** 0.5,
                1e-8,
            ),
        )
    )
    assert {type(value) for value in scalars} == {np.float32}


def test_update__scale_multiplies_the_gradient() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    results = []
    for scale, given_gradient in ((1.0, gradient * 0.3), (0.3, gradient)):
        state = [
            torch.ones(1000),
            torch.zeros(1000),
            torch.zeros(1000),
            torch.zeros(1000),
        ]
        reference.update(
            *arguments([given_gradient, *state]), Hyper().scalars(1, scale)
        )
        results.append(state)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


HISTORIES = ("steady", "spiky", "constant", "fading")


def gradients(
    history: str, like: torch.Tensor, step: int, generator: torch.Generator
) -> torch.Tensor:
    normal = torch.randn(like.shape, generator=generator)
    return {
        "steady": normal * 1e-3,
        "spiky": normal * 10 ** (3 * torch.randn(like.shape, generator=generator) - 3),
        "constant": 1e-3 * like.sign(),
        "fading": normal * 1e-2 * 0.5**step,
    }[history]


def test_update__is_that_of_torch_within_four_ulp() -> None:
    for hyper, history in list(
        itertools.product(
            (
                Hyper(),
                Hyper(3e-4, 0.9, 0.95, 1e-8, 0.1),
                Hyper(6e-5, 0.95, 0.98, 1e-10, 0.0),
            ),
            HISTORIES,
        )
    ):
        generator = torch.Generator().manual_seed(7)
        length = 20_000
        master = 0.02 * torch.randn(length, generator=generator)
        first, second, out = (
            torch.zeros(length),
            torch.zeros(length),
            torch.empty(length),
        )
        for step in range(1, 25):
            gradient = gradients(history, master, step, generator)
            other = torch.nn.Parameter(master.clone())
            other.grad = gradient.clone()
            optimizer = torch.optim.AdamW(
                [other],
                lr=hyper.lr,
                betas=(hyper.beta1, hyper.beta2),
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
                foreach=False,
                fused=False,
            )
            optimizer.state[other] = {
                "step": torch.tensor(step - 1.0),
                "exp_avg": first.clone(),
                "exp_avg_sq": second.clone(),
            }
            optimizer.step()
            largest = np.maximum(master.abs().numpy(), np.float32(hyper.lr))
            reference.update(
                gradient, (master, first, second), out, hyper.scalars(step)
            )
            unit = np.spacing(np.maximum(largest, master.abs().numpy()))
            assert (
                (master.double() - other.detach().double()).abs().numpy() <= 4 * unit
            ).all(), step
            assert torch.equal(out, master)


def test_update__first_moment_is_the_gradient_without_momentum() -> None:
    """With a small beta1, m + (g - m) would lose a gradient that is small compared with
    m."""
    gradient, first = torch.full((10,), 1e-12), torch.ones(10)
    state = [torch.ones(10), first, torch.ones(10), torch.zeros(10)]
    reference.update(*arguments([gradient, *state]), Hyper(beta1=0.0).scalars(3))
    assert torch.equal(first, gradient)
