"""Gradients of slices, combined from gradients of parameters, and the scalars of
DeepSpeed's Adam."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.features.deepspeed.engine.state_access import CpuAdamScalars
from ebbtide.features.deepspeed.engine.subgroup_slices import (
    SliceGradients,
    SubgroupSlice,
    cut_subgroups,
    engine_subgroups,
)
from ebbtide.interleave.engine.rules.adamw import ADAMW

CPU = torch.device("cpu")
groups_of_params = st.lists(
    st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=4
)


def extents_of(groups: list[list[int]]) -> dict[int, SubgroupSlice]:
    extents: dict[int, SubgroupSlice] = {}
    for group, lengths in enumerate(groups):
        begin = 0
        for length in lengths:
            extents[len(extents)] = SubgroupSlice(group, begin, begin + length)
            begin += length
    return extents


@given(groups_of_params, st.integers(1, 40))
def test_cut_subgroups__covers_each_subgroup_once(
    groups: list[list[int]], max_params: int
) -> None:
    sizes = [sum(lengths) for lengths in groups]
    slices = cut_subgroups(sizes, max_params)
    assert all(0 < part.params <= max_params for part in slices)
    for group, size in enumerate(sizes):
        own = [part for part in slices if part.group == group]
        assert [own[0].begin, *(part.end for part in own)] == [
            *(part.begin for part in own),
            size,
        ]
    subgroups = engine_subgroups(
        slices, torch.bfloat16, torch.float32, [ADAMW] * len(groups)
    )
    assert [subgroup.params for subgroup in subgroups] == [
        part.params for part in slices
    ]


@given(
    groups_of_params,
    st.integers(1, 40),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
def test_slice_gradients__combines_gradients_in_any_order(
    groups: list[list[int]], max_params: int, random: object, missing: int
) -> None:
    """Each slice is reported once, with its last gradient; elements without a gradient
    and padding are zero."""
    extents = extents_of(groups)
    slices = cut_subgroups([sum(lengths) for lengths in groups], max_params)
    expected = [torch.zeros(sum(lengths)) for lengths in groups]
    gradients = SliceGradients(slices, extents, torch.float32)
    assert gradients.params == sum(map(sum, groups))
    order = list(extents)
    random.shuffle(order)  # type: ignore[attr-defined]
    completed: list[int] = []
    for param in order[missing:]:
        extent = extents[param]
        # The last element of some is padding, which gradients do not have.
        length = extent.end - extent.begin - (param % 3 == 0)
        gradient = torch.arange(1.0, length + 1) + 100 * param
        expected[extent.group][extent.begin : extent.begin + length] = gradient
        completed += gradients.add(param, gradient)
        assert gradients.has_gradient(param)
        assert torch.equal(gradients.param_gradient(param, CPU)[:length], gradient)
    assert len(set(completed)) == len(completed)
    if not missing:
        assert sorted(completed) == list(range(len(slices)))
    for number, part in enumerate(slices):
        assert torch.equal(
            gradients.pop(number, CPU), expected[part.group][part.begin : part.end]
        )
    gradients.clear()
    assert gradients.is_empty
    assert not any(gradients.pop(number, CPU).any() for number in range(len(slices)))


def test_cpu_adam_scalars__equals_those_of_deepspeed(
    deepspeed: object, tmp_path: object
) -> None:
    """One element with moments of zero and a gradient of 1 shows the shares; a step
    shows the rate."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = DeepSpeedCPUAdam([weight], lr=1e-2, weight_decay=0.0)
    ours, group = CpuAdamScalars(), {**ADAMW.defaults, "lr": 1e-2, "weight_decay": 0.0}
    for step in [*range(1, 40), 900, 901, 500]:
        weight.data.zero_()
        weight.grad = torch.ones(1)
        if theirs.state[weight]:
            theirs.state[weight].update(
                exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1), step=step - 1
            )
        theirs.step()
        _, _, share1, _, share2, _, rate, root, eps = ours.scalars(group, step, 1.0)
        assert theirs.state[weight]["exp_avg"].item() == share1
        assert theirs.state[weight]["exp_avg_sq"].item() == share2
        expected = -rate * share1 / (np.sqrt(share2) / root + eps)
        assert weight.item() == pytest.approx(float(expected), rel=4e-7)
