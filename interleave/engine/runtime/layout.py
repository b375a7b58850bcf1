"""How the parameters of an optimizer divide into subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's elements in a subgroup. param: its index among the optimizer's; begin, end: in the flat
    parameter; at: where it begins in the subgroup."""

    param: int
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Subgroup:
    """params: elements in all; dtype: of all its parameters; grad_dtype: of their gradients."""

    params: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    grad_dtype: torch.dtype


def divide(params: Sequence[torch.Tensor], subgroup_params: int) -> tuple[Subgroup, ...]:
    """Subgroups of so many elements, in the order of the parameters; large parameters are cut. The last before a change
    of dtype may be smaller, since what moves as one must be of one kind."""
    subgroups: list[Subgroup] = []
    pieces: list[Piece] = []
    held = 0
    dtype = params[0].dtype if params else torch.float32

    def close() -> None:
        nonlocal pieces, held
        if held:
            subgroups.append(Subgroup(held, dtype, tuple(pieces), dtype))
        pieces, held = [], 0

    for index, param in enumerate(params):
        if param.numel() and param.dtype != dtype:
            close()
            dtype = param.dtype
        begin = 0
        while begin < param.numel():
            end = min(param.numel(), begin + subgroup_params - held)
            pieces.append(Piece(index, begin, end, held))
            held += end - begin
            begin = end
            if held == subgroup_params:
                close()
    close()
    return tuple(subgroups)
