"""Layout: every element of every parameter is in one subgroup, in order."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.runtime.layout import divide
from tests.interleave.engine.states import DTYPES


@st.composite
def parameters(draw: st.DrawFn) -> list[torch.Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8))
    return [
        torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES[:2]))) for shape in shapes
    ]


@given(parameters(), st.integers(1, 200))
def test_divide__puts_every_element_into_one_subgroup(
    params: list[torch.Tensor], size: int
) -> None:
    subgroups = divide(params, size)
    elements: list[tuple[int, int]] = []
    for subgroup in subgroups:
        assert 0 < subgroup.params <= size
        offset = 0
        for segment in subgroup.segments:
            # Segments have no gaps, none is empty, and all have the dtype of the
            # subgroup.
            assert segment.offset == offset
            assert segment.begin < segment.end
            assert params[segment.param].dtype == subgroup.dtype
            offset += segment.end - segment.begin
            elements += [
                (segment.param, index) for index in range(segment.begin, segment.end)
            ]
        assert offset == subgroup.params
    assert elements == [
        (param, index)
        for param, tensor in enumerate(params)
        for index in range(tensor.numel())
    ]


@given(parameters(), st.integers(1, 200))
def test_divide__only_the_last_subgroup_of_a_dtype_is_smaller(
    params: list[torch.Tensor], size: int
) -> None:
    subgroups = divide(params, size)
    for one, following in pairwise(subgroups):
        assert one.params == size or one.dtype != following.dtype


def test_divide__splits_large_parameters_and_combines_small_ones() -> None:
    params = [
        torch.zeros(2, 5),
        torch.zeros(1),
        torch.zeros(3),
        torch.zeros(4, dtype=torch.bfloat16),
    ]
    segments = [
        [
            (segment.param, segment.begin, segment.end, segment.offset)
            for segment in subgroup.segments
        ]
        for subgroup in divide(params, 8)
    ]
    assert segments == [
        [(0, 0, 8, 0)],
        [(0, 8, 10, 0), (1, 0, 1, 2), (2, 0, 3, 3)],
        [(3, 0, 4, 0)],
    ]


def test_divide__returns_nothing_for_no_elements() -> None:
    assert divide([], 10) == ()
    assert divide([torch.zeros(0)], 10) == ()
