"""Subgroups: every element of every parameter in one of them, in order, and nothing twice."""

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
    return [torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES[:2]))) for shape in shapes]


@given(parameters(), st.integers(1, 200))
def test_every_element_is_in_one_place(params: list[torch.Tensor], size: int) -> None:
    subgroups = divide(params, size)
    where: list[tuple[int, int]] = []
    for subgroup in subgroups:
        assert 0 < subgroup.params <= size
        at = 0
        for piece in subgroup.pieces:
            # Pieces lie side by side, none is empty, and all are of the subgroup's kind.
            assert piece.at == at
            assert piece.begin < piece.end
            assert params[piece.param].dtype == subgroup.dtype
            at += piece.end - piece.begin
            where += [(piece.param, index) for index in range(piece.begin, piece.end)]
        assert at == subgroup.params
    assert where == [(param, index) for param, tensor in enumerate(params) for index in range(tensor.numel())]


@given(parameters(), st.integers(1, 200))
def test_only_the_last_of_a_kind_is_smaller(params: list[torch.Tensor], size: int) -> None:
    subgroups = divide(params, size)
    for one, following in pairwise(subgroups):
        assert one.params == size or one.dtype != following.dtype


def test_a_parameter_is_cut_and_small_ones_share() -> None:
    params = [torch.zeros(2, 5), torch.zeros(1), torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)]
    found = [
        [(piece.param, piece.begin, piece.end, piece.at) for piece in subgroup.pieces] for subgroup in divide(params, 8)
    ]
    assert found == [[(0, 0, 8, 0)], [(0, 8, 10, 0), (1, 0, 1, 2), (2, 0, 3, 3)], [(3, 0, 4, 0)]]


def test_nothing_to_divide() -> None:
    assert divide([], 10) == ()
    assert divide([torch.zeros(0)], 10) == ()
