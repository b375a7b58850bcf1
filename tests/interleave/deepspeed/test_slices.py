"""Gradients put together from their parameters' parts, and the constants of DeepSpeed's Adam."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.deepspeed.adam_scalars import CpuAdamConstants
from ebbtide.interleave.deepspeed.subgroup_slices import Extent, Gradients, cut, subgroups
from ebbtide.interleave.engine.numerics.reference import Hyper

CPU = torch.device("cpu")
groups_of_params = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=4)


def extents_of(groups: list[list[int]]) -> dict[int, Extent]:
    found: dict[int, Extent] = {}
    for group, lengths in enumerate(groups):
        begin = 0
        for length in lengths:
            found[len(found)] = Extent(group, begin, begin + length)
            begin += length
    return found


@given(groups_of_params, st.integers(1, 40))
def test_slices_cover_each_subgroup_once(groups: list[list[int]], most: int) -> None:
    sizes = [sum(lengths) for lengths in groups]
    slices = cut(sizes, most)
    assert all(0 < piece.params <= most for piece in slices)
    for group, size in enumerate(sizes):
        own = [piece for piece in slices if piece.group == group]
        assert [own[0].begin, *(piece.end for piece in own)] == [*(piece.begin for piece in own), size]
    made = subgroups(slices, torch.bfloat16, torch.float32)
    assert [of.params for of in made] == [piece.params for piece in slices]


@given(groups_of_params, st.integers(1, 40), st.randoms(use_true_random=False), st.integers(0, 3))
def test_gradients_come_together_in_any_order(groups: list[list[int]], most: int, random: object, missing: int) -> None:
    """Each slice is told once, when its last parameter has arrived; what does not arrive is zero, as is padding."""
    extents = extents_of(groups)
    slices = cut([sum(lengths) for lengths in groups], most)
    expected = [torch.zeros(sum(lengths)) for lengths in groups]
    gradients = Gradients(slices, extents, torch.float32)
    assert gradients.params == sum(map(sum, groups))
    order = list(extents)
    random.shuffle(order)  # type: ignore[attr-defined]
    told: list[int] = []
    for param in order[missing:]:
        extent = extents[param]
        # The last element of some is padding, which gradients do not have.
        length = extent.end - extent.begin - (param % 3 == 0)
        gradient = torch.arange(1.0, length + 1) + 100 * param
        expected[extent.group][extent.begin : extent.begin + length] = gradient
        told += gradients.arrive(param, gradient)
        assert gradients.has(param)
        assert torch.equal(gradients.of_param(param, CPU)[:length], gradient)
    assert len(set(told)) == len(told)
    if not missing:
        assert sorted(told) == list(range(len(slices)))
    for number, piece in enumerate(slices):
        assert torch.equal(gradients.take(number, CPU), expected[piece.group][piece.begin : piece.end])
    gradients.forget()
    assert not gradients.any
    assert not any(gradients.take(number, CPU).any() for number in range(len(slices)))


def test_constants_are_those_of_deepspeeds_adam(deepspeed: object, tmp_path: object) -> None:
    """One element, whose moments are zero and whose gradient is 1, tells the shares; a step tells the rate."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = DeepSpeedCPUAdam([weight], lr=1e-2, weight_decay=0.0)
    ours, hyper = CpuAdamConstants(), Hyper(lr=1e-2, weight_decay=0.0)
    for step in [*range(1, 40), 900, 901, 500]:
        weight.data.zero_()
        weight.grad = torch.ones(1)
        if theirs.state[weight]:
            theirs.state[weight].update(exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1), step=step - 1)
        theirs.step()
        found = ours.scalars(hyper, step, 1.0)
        assert theirs.state[weight]["exp_avg"].item() == found.share1
        assert theirs.state[weight]["exp_avg_sq"].item() == found.share2
        expected = -found.rate * found.share1 / (np.sqrt(found.share2) / found.root + found.eps)
        assert weight.item() == pytest.approx(float(expected), rel=4e-7)
