"""Division of an optimizer's parameters into subgroups.

Also the layout of the subgroups' state in memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ebbtide.interleave.engine.numerics.rounding import FACTOR
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import BLOCK, UpdateRule

_Value = TypeVar("_Value")

# The row of a subgroup's state that has masters, or a part of them, if there is one;
# the moments of its rule follow.
MASTER = 0


@dataclass(frozen=True)
class ParamSegment:
    """A run of elements of one parameter in a subgroup.

    It goes from `begin` to `end` in the flat parameter (`param` is its index in the
    optimizer), and from `offset` on in the subgroup. `shape` is the shape of a whole
    matrix; `block` is the run's first block in the subgroup."""

    param: int
    begin: int
    end: int
    offset: int
    shape: tuple[int, int] | None = None
    block: int = 0

    @property
    def span(self) -> slice:
        """The elements in the subgroup."""
        return slice(self.offset, self.offset + self.end - self.begin)

    @property
    def position(self) -> int:
        """The position of the first element, see rounding.py."""
        return (self.begin + self.param * FACTOR) % 2**32


@dataclass(frozen=True)
class Subgroup:
    """Parameters of one dtype whose state is moved and updated as one, by a rule.
    Segments are in order, without gaps."""

    params: int
    dtype: torch.dtype
    segments: tuple[ParamSegment, ...]
    grad_dtype: torch.dtype
    rule: UpdateRule = ADAMW


def divide(
    params: Sequence[torch.Tensor],
    subgroup_params: int,
    rules: Sequence[UpdateRule] | None = None,
) -> tuple[Subgroup, ...]:
    """Divide parameters into subgroups of `subgroup_params` elements, in order.

    A subgroup has one dtype and rule (None: `adamw`). Large parameters are split,
    except for matrices that their rule updates as a whole; between blocks if their
    moments have scales. The last subgroup before a change may be smaller.
    """
    rules = rules or [ADAMW] * len(params)
    division = _Division(subgroup_params)
    for index, (param, rule) in enumerate(zip(params, rules, strict=True)):
        if not param.numel():
            continue
        division.begin(param.dtype, rule)
        if rule.whole_update is not None:
            division.add_whole(index, param)
        else:
            division.add(index, param.numel())
    division.close()
    return tuple(division.subgroups)


class _Division:
    """Subgroups; the last of them is open."""

    def __init__(self, subgroup_params: int) -> None:
        self.subgroups: list[Subgroup] = []
        self._subgroup_params = subgroup_params
        self._dtype, self._rule = torch.float32, ADAMW
        self._segments: list[ParamSegment] = []
        self._size = 0

    def begin(self, dtype: torch.dtype, rule: UpdateRule) -> None:
        """Go on with parameters of a dtype and a rule."""
        if (dtype, rule) != (self._dtype, self._rule):
            self.close()
            self._dtype, self._rule = dtype, rule

    def add_whole(self, index: int, param: torch.Tensor) -> None:
        """Add a matrix that is not split."""
        count = param.numel()
        if self._size + count > self._subgroup_params:
            self.close()
        self._segments.append(
            ParamSegment(index, 0, count, self._size, tuple(param.shape))
        )
        self._size += count

    def add(self, index: int, count: int) -> None:
        """Add the elements of a parameter."""
        begin = 0
        while begin < count:
            limit = self._subgroup_params - self._size
            if self._rule.scales and limit < count - begin:
                limit -= limit % BLOCK
                if not limit and self._size:
                    self.close()
                    continue
            end = min(count, begin + (limit or BLOCK))
            block = _blocks(self._segments, self._size)
            self._segments.append(
                ParamSegment(index, begin, end, self._size, block=block)
            )
            self._size += end - begin
            begin = end
            if self._size >= self._subgroup_params:
                self.close()

    def close(self) -> None:
        """Close the open subgroup, if it has parameters."""
        if self._size:
            segments = tuple(self._segments)
            self.subgroups.append(
                Subgroup(self._size, self._dtype, segments, self._dtype, self._rule)
            )
        self._segments, self._size = [], 0


def most_frequent(
    subgroups: Sequence[Subgroup],
    value_of: Callable[[Subgroup], _Value],
    default: _Value,
) -> _Value:
    """Return the value of the subgroups with most parameters, or the default."""
    params: Counter[_Value] = Counter()
    for subgroup in subgroups:
        params[value_of(subgroup)] += subgroup.params
    return max(params, key=params.__getitem__, default=default)


def _blocks(segments: Sequence[ParamSegment], params: int) -> int:
    """Return the number of blocks of segments, or of `params` elements without any."""
    if not segments:
        return -(-params // BLOCK)
    last = segments[-1]
    return last.block - (last.begin - last.end) // BLOCK


def _row_bytes(subgroup: Subgroup) -> list[tuple[torch.dtype, int]]:
    rule, blocks = subgroup.rule, _blocks(subgroup.segments, subgroup.params)
    lengths = [subgroup.params] * (rule.has_masters + len(rule.moments)) + [
        blocks
    ] * len(rule.scales)
    pairs = zip(rule.dtypes, lengths, strict=True)
    return [(dtype, length * dtype.itemsize) for dtype, length in pairs]


def state_elements(subgroup: Subgroup) -> int:
    """Return the number of fp32 elements of memory for a subgroup's state."""
    return int(
        -(-sum(nbytes for _, nbytes in _row_bytes(subgroup)) // torch.float32.itemsize)
    )


def state_shape(subgroup: Subgroup) -> tuple[int, ...]:
    """Return the shape of a subgroup's state, fp32: (rows, params), or flat if not all
    rows are fp32."""
    dtypes = subgroup.rule.dtypes
    return (
        (len(dtypes), subgroup.params)
        if {*dtypes} == {torch.float32}
        else (state_elements(subgroup),)
    )


def state_rows(state: torch.Tensor, subgroup: Subgroup) -> tuple[torch.Tensor, ...]:
    """Return views of a state of `state_shape`, for each row of `UpdateRule.dtypes`."""
    if state.dim() == 2:
        return tuple(state)
    memory, rows, begin, sizes = state.view(torch.uint8), {}, 0, _row_bytes(subgroup)
    # The widest first, since views begin at multiples of their width; parts of masters
    # after others of their width.
    for row in sorted(
        range(len(sizes)),
        key=lambda row: (-sizes[row][0].itemsize, sizes[row][0] == torch.int16),
    ):
        dtype, nbytes = sizes[row]
        rows[row], begin = memory[begin : begin + nbytes].view(dtype), begin + nbytes
    return tuple(rows[row] for row in range(len(sizes)))


def segment_rows(
    rows: Sequence[torch.Tensor], subgroup: Subgroup, segment: ParamSegment
) -> tuple[torch.Tensor, ...]:
    """Return a segment's part of the rows of a state."""
    parts = subgroup.rule.row_slices(
        segment.span.start, segment.span.stop, segment.block
    )
    return tuple(row[part] for row, part in zip(rows, parts, strict=True))


def param_rows(
    rows: Sequence[torch.Tensor], subgroup: Subgroup, segment: ParamSegment
) -> tuple[torch.Tensor, ...]:
    """Return a segment's part of the rows of the state of its parameter."""
    parts = subgroup.rule.saved.row_slices(
        segment.begin, segment.end, segment.begin // BLOCK
    )
    return tuple(row[part] for row, part in zip(rows, parts, strict=True))
