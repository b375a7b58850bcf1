"""Division of the parameters of an optimizer into subgroups, and the layout of their state in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.numerics.fingerprint import FACTOR
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule

# The row of a subgroup's state that has masters or their remainders; the moments of its rule follow.
MASTER = 0
# The name of masters in state dicts and recordings.
MASTER_NAME = "master"


@dataclass(frozen=True)
class ParamSegment:
    """A run of elements of one parameter (its index in the optimizer) in a subgroup.

    `begin` is the first element and `end` the one after the last, in the flat parameter; `offset` is the first in the
    subgroup; `shape` that of a whole matrix, for rules of such."""

    param: int
    begin: int
    end: int
    offset: int
    shape: tuple[int, int] | None = None

    @property
    def span(self) -> slice:
        """The elements in the subgroup."""
        return slice(self.offset, self.offset + self.end - self.begin)

    @property
    def position(self) -> int:
        """That of the first element, see rounding.py."""
        return (self.begin + self.param * FACTOR) % 2**32


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
    params: Sequence[torch.Tensor],
    subgroup_params: int,
    has_remainders: bool = False,
    rules: Sequence[UpdateRule] | None = None,
) -> tuple[Subgroup, ...]:
    """Divide parameters into subgroups of `subgroup_params` elements, in order; large parameters are split, but for
    matrices that their rule updates as a whole.

    The last subgroup before a change of dtype or rule may be smaller, since a subgroup has one. `rules` are those of
    the parameters; None: all have the rule `adamw`."""
    subgroups: list[Subgroup] = []
    segments: list[ParamSegment] = []
    size = 0
    rules = rules or [ADAMW] * len(params)
    kinds = [(param.dtype, rule) for param, rule in zip(params, rules, strict=True)]
    dtype, rule = kinds[0] if kinds else (torch.float32, ADAMW)

    def close() -> None:
        nonlocal segments, size
        if size:
            subgroups.append(Subgroup(size, dtype, tuple(segments), dtype, has_remainders, rule))
        segments, size = [], 0

    for index, param in enumerate(params):
        if param.numel() and kinds[index] != (dtype, rule):
            close()
            dtype, rule = kinds[index]
        begin = 0
        if rule.finish is not None and param.numel():
            if size + param.numel() > subgroup_params:
                close()
            segments.append(ParamSegment(index, 0, param.numel(), size, tuple(param.shape)))
            size += param.numel()
            continue
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
    # Two numbers of 16 bits take the memory of one fp32 number.
    elements: int = -(-subgroup.rule.state_bytes(subgroup.has_remainders) * subgroup.params // torch.float32.itemsize)
    return elements


def state_shape(subgroup: Subgroup) -> tuple[int, ...]:
    """Return the shape of a subgroup's state, fp32: (rows, params), or flat if not all rows are fp32."""
    dtypes = subgroup.rule.dtypes(subgroup.has_remainders)
    return (len(dtypes), subgroup.params) if {*dtypes} == {torch.float32} else (state_elements(subgroup),)


def state_rows(state: torch.Tensor, subgroup: Subgroup) -> tuple[torch.Tensor, ...]:
    """Return views of a state of `state_shape`: master (fp32) or remainder (int16), and the moments."""
    if state.dim() == 2:
        return tuple(state)
    dtypes = subgroup.rule.dtypes(subgroup.has_remainders)
    halves, rows, begin = state.view(torch.int16), {}, 0
    # The widest first, since views begin at multiples of their width; remainders last.
    for row in sorted(range(len(dtypes)), key=lambda row: (-dtypes[row].itemsize, dtypes[row] == torch.int16)):
        end = begin + subgroup.params * dtypes[row].itemsize // torch.int16.itemsize
        rows[row], begin = halves[begin:end].view(dtypes[row]), end
    return tuple(rows[row] for row in range(len(dtypes)))
