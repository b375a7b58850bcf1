"""Division of the parameters of an optimizer into subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParamSegment:
    """A run of elements of one parameter in a subgroup.

    Attributes:
        param: Index of the parameter in the optimizer.
        begin: First element, in the flat parameter.
        end: Element after the last one, in the flat parameter.
        offset: First element, in the subgroup.
    """

    param: int
    begin: int
    end: int
    offset: int

    @property
    def span(self) -> slice:
        """The elements in the subgroup."""
        return slice(self.offset, self.offset + self.end - self.begin)


@dataclass(frozen=True)
class Subgroup:
    """Parameters whose state is moved and updated as one.

    Attributes:
        params: Number of elements.
        dtype: Type of all its parameters.
        segments: The parts of parameters, in order and without gaps.
        grad_dtype: Type of the gradients.
        has_remainders: Whether its state has remainders of masters instead of masters: see remainder.py.
    """

    params: int
    dtype: torch.dtype
    segments: tuple[ParamSegment, ...]
    grad_dtype: torch.dtype
    has_remainders: bool = False


def divide(params: Sequence[torch.Tensor], subgroup_params: int, has_remainders: bool = False) -> tuple[Subgroup, ...]:
    """Divide parameters into subgroups of `subgroup_params` elements, in order; large parameters are split.

    The last subgroup before a change of dtype may be smaller, since a subgroup has one dtype."""
    subgroups: list[Subgroup] = []
    segments: list[ParamSegment] = []
    size = 0
    dtype = params[0].dtype if params else torch.float32

    def close() -> None:
        nonlocal segments, size
        if size:
            subgroups.append(Subgroup(size, dtype, tuple(segments), dtype, has_remainders))
        segments, size = [], 0

    for index, param in enumerate(params):
        if param.numel() and param.dtype != dtype:
            close()
            dtype = param.dtype
        begin = 0
        while begin < param.numel():
            end = min(param.numel(), begin + subgroup_params - size)
            segments.append(ParamSegment(index, begin, end, size))
            size += end - begin
            begin = end
            if size == subgroup_params:
                close()
    close()
    return tuple(subgroups)
