"""Stochastic rounding of bfloat16 moments."""

from __future__ import annotations

import numpy as np
import torch

from ebbtide.interleave.engine.numerics import reference
from ebbtide.interleave.engine.numerics.reference import bfloat16_bits
from ebbtide.interleave.engine.numerics.rounding import random_bits
from ebbtide.interleave.engine.rules import find_rule
from ebbtide.interleave.engine.rules.adamw import ADAMW

COUNT = 1 << 16


def test_random_bits__are_even_and_independent_of_each_other() -> None:
    """Over elements, over steps and between the two moments; limits are five standard
    deviations."""
    rows = np.stack(
        [random_bits(np.float32(seed), 77, COUNT) for seed in range(1, 9)]
    ).astype(np.float64)
    halves = np.stack([rows % 2**16, rows // 2**16]) / 2**16 - 0.5
    limit = 5 / np.sqrt(12 * COUNT)
    assert np.abs(halves.mean(axis=2)).max() < limit
    assert np.abs(halves.mean(axis=1)).std() < 1.1 / np.sqrt(12 * 8)
    flat = halves.reshape(16, COUNT)
    correlations = flat @ flat.T * 12 / COUNT - np.eye(16)
    assert np.abs(correlations).max() < 5 / np.sqrt(COUNT)
    neighbours = (flat[:, 1:] * flat[:, :-1]).mean(axis=1) * 12
    assert np.abs(neighbours).max() < 5 / np.sqrt(COUNT)


def test_random_bits__do_not_depend_on_the_division() -> None:
    whole = random_bits(np.float32(3), 2**32 - 40, 100)
    assert np.array_equal(whole[60:], random_bits(np.float32(3), 20, 40))


def test_stochastic_rounding__keeps_the_mean_and_exact_values() -> None:
    noise = random_bits(np.float32(1), 0, COUNT) & np.uint32(0xFFFF)
    for value in (1.0 + 2**-9, -1.0 - 3 * 2**-12, 3e-39, 1e30):
        values = np.full(COUNT, value, np.float32)
        rounded = (
            (bfloat16_bits(values, noise).astype(np.uint32) << 16)
            .view(np.float32)
            .astype(np.float64)
        )
        unit = rounded.max() - rounded.min()
        assert abs(rounded.mean() - float(np.float32(value))) < 3 * unit / np.sqrt(
            COUNT
        )
    for value in (0.0, -0.0, 1.5, np.inf, -np.inf, np.nan):
        values = np.full(COUNT, value, np.float32)
        assert np.array_equal(bfloat16_bits(values, noise), bfloat16_bits(values))


def test_adamw_bf16__follows_small_changes_only_with_stochastic_rounding() -> None:
    """With beta2 = 0.999 a step changes the second moment by less than half a unit of
    bfloat16."""
    rule, means = find_rule("adamw-bf16"), {}
    for stochastic in (True, False):
        group = {**rule.defaults, "stochastic_rounding": stochastic}
        state = [
            torch.zeros(5000),
            torch.zeros(5000).bfloat16(),
            torch.full((5000,), 1.0).bfloat16(),
        ]
        for step in range(1, 301):
            reference.update(
                torch.full((5000,), 2.0),
                state,
                torch.zeros(5000),
                rule.scalars(group, step),
                rule,
                9,
            )
        means[stochastic] = state[2].double().mean().item()
    expected = 4 - 3 * 0.999**300
    assert abs(means[True] - expected) < 0.01
    assert means[False] == 1.0


def test_adamw_bf16__has_the_master_of_adamw_and_its_moments_rounded() -> None:
    rule, generator = find_rule("adamw-bf16"), torch.Generator().manual_seed(3)
    state = [
        torch.randn(999, generator=generator),
        torch.randn(999, generator=generator).bfloat16(),
    ]
    state.append(torch.rand(999, generator=generator).bfloat16())
    gradient, wide = (
        torch.randn(999, generator=generator),
        [row.float() for row in state],
    )
    reference.update(
        gradient, state, torch.zeros(999), rule.scalars(rule.defaults, 7), rule, 5
    )
    reference.update(gradient, wide, torch.zeros(999), ADAMW.scalars(ADAMW.defaults, 7))
    assert torch.equal(state[0], wide[0])
    for moment, exact in zip(state[1:], wide[1:], strict=True):
        assert ((moment.float() - exact).abs() < 2**-7 * exact.abs()).all()
        assert not torch.equal(moment, exact.bfloat16())
