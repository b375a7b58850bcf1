"""Updates of many small tensors as one of a large tensor, on the host."""

from collections.abc import Hashable, Iterator, Sequence

import torch

from ebbtide.interleave.engine.numerics.reference import TensorUpdate

# Elements of tensors whose update costs less than its call.
_SMALL = 16 << 10


def joined_updates(updates: Sequence[TensorUpdate]) -> Iterator[TensorUpdate]:
    """Yield updates to run, one after the other, in the place of others.

    Small ones with the same rule and factors are joined. Their results are copied to
    the tensors when the next one is taken.
    """
    groups: dict[Hashable, list[TensorUpdate]] = {}
    for update in updates:
        if update.out.numel() < _SMALL and not update.rule.has_ranges:
            groups.setdefault(_kind(update), []).append(update)
        else:
            yield update
    for group in groups.values():
        if len(group) == 1:
            yield group[0]
            continue
        joined = _joined(group)
        yield joined
        _separate(joined, group)


def _kind(update: TensorUpdate) -> Hashable:
    is_own_master = update.written is None
    dtypes = update.grad.dtype, update.out.dtype, is_own_master
    return update.rule, update.scalars, dtypes


def _joined(group: Sequence[TensorUpdate]) -> TensorUpdate:
    first = group[0]
    state = [torch.cat(rows) for rows in zip(*(of.state for of in group), strict=True)]
    # A parameter that is its own master is the first row.
    out = state[0] if first.written is None else torch.cat([of.out for of in group])
    grad = torch.cat([of.grad for of in group])
    return TensorUpdate(grad, state, out, first.scalars, first.rule)


def _separate(joined: TensorUpdate, group: Sequence[TensorUpdate]) -> None:
    """Copy the results of a joined update to the tensors of its parts."""
    sizes = [of.out.numel() for of in group]
    rows = list(zip(*(of.state for of in group), strict=True))
    results = [*zip(joined.state, rows, strict=True)]
    if joined.written is not None:
        results.append((joined.out, tuple(of.out for of in group)))
    for result, targets in results:
        torch._foreach_copy_(list(targets), list(result.split(sizes)))
