"""Division of the parameters of an optimizer into subgroups, and the layout of their state in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule

# The row of a subgroup's state that has masters or their remainders; the moments of its rule follow.
MASTER = 0


@dataclass(frozen=True)
class ParamSegment:
    """A run of elements of one parameter (its index in the optimizer) in a subgroup.

    `begin` is the first element and `end` the one after the last, in the flat parameter; `offset` is the first in the
    subgroup."""

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
    """Parameters of one dtype whose state is moved and updated as one, by a rule. Segments are in order, without gaps.

    `has_remainders`: the state has remainders of masters instead of masters, see remainder.py."""

    params: int
    dtype: torch.dtype
    segments: tuple[ParamSegment, ...]
    grad_dtype: torch.dtype
    has_remainders: bool = False
    rule: UpdateRule = ADAMW


def divide(
    params: Sequence[torch.Tensor], subgroup_params: int, has_remainders: bool = False, rule: UpdateRule = ADAMW
) -> tuple[Subgroup, ...]:
    """Divide parameters into subgroups of `subgroup_params` elements, in order; large parameters are split.

    The last subgroup before a change of dtype may be smaller, since a subgroup has one dtype."""
    subgroups: list[Subgroup] = []
    segments: list[ParamSegment] = []
    size = 0
    dtype = params[0].dtype if params else torch.float32

    def close() -> None:
        nonlocal segments, size
        if size:
            subgroups.append(Subgroup(size, dtype, tuple(segments), dtype, has_remainders, rule))
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


def state_elements(subgroup: Subgroup) -> int:
    """Return the number of fp32 elements of memory for a subgroup's state."""
    # Two remainders take the memory of one fp32 number.
    masters = -(-subgroup.params // 2) if subgroup.has_remainders else subgroup.params
    return masters + len(subgroup.rule.moments) * subgroup.params


def state_shape(subgroup: Subgroup) -> tuple[int, ...]:
    """Return the shape of a subgroup's state, fp32: (rows, params), or flat if it has remainders."""
    return (state_elements(subgroup),) if subgroup.has_remainders else (subgroup.rule.rows, subgroup.params)


def state_rows(state: torch.Tensor, subgroup: Subgroup) -> tuple[torch.Tensor, ...]:
    """Return views of a state of `state_shape`: master (fp32) or remainder (int16), and the moments (fp32)."""
    if not subgroup.has_remainders:
        return tuple(state)
    end = len(subgroup.rule.moments) * subgroup.params
    return state[end:].view(torch.int16)[: subgroup.params], *state[:end].view(-1, subgroup.params)
