"""Counts of elements of masks that are not zero, where the making of a mask fixes
them."""

import math
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_ZEROS = frozenset(
    {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
)
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default, _aten.cat.default})
_SCATTERS = frozenset(
    {_aten.scatter.value, _aten.scatter_.value, _aten.scatter.src, _aten.scatter_.src}
)
_WRITES = _SCATTERS | {_aten.index_put.default, _aten.index_put_.default}
# Floating-point masks are made and copied alone: weights have no zeros to count.
_OF_FLOATS = _ZEROS | _COPIES | _SCATTERS
_PRODUCTS = frozenset(
    {
        _aten.bitwise_and.Tensor,
        _aten.logical_and.default,
        _aten.mul.Tensor,
    }
)


class NonzeroCounts:
    """The most elements of a storage that are not zero, of masks and other integers.

    A mask of zeros in which a sampler sets 256 has 256, whatever their places; an
    encoding in which each token has one class, as many as tokens. Of a part, such as a
    class, an even share is taken.
    """

    def __init__(self) -> None:
        # Address of a storage -> (count, the reference whose callback removes it)
        self._counts: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, tensor: Any) -> int | None:
        """Return the count of a tensor; None: it is not known."""
        storage = tensor.untyped_storage()
        entry = self._counts.get(storage._cdata)
        if entry is None:
            return None
        whole = max(storage.nbytes() // tensor.element_size(), 1)
        share: int = math.ceil(entry[0] * tensor.numel() / whole)
        return share if share < tensor.numel() else int(tensor.numel())

    def set(self, tensor: Any, count: int) -> None:
        """Set the count of a tensor that is its whole storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference = weakref.ref(storage, lambda _: self._counts.pop(key, None))
        self._counts[key] = min(count, tensor.numel()), reference

    def forget(self, tensor: Any) -> None:
        """Forget the count of a tensor that is written."""
        self._counts.pop(tensor.untyped_storage()._cdata, None)

    def after(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Any], output: Any
    ) -> int | None:
        """Return the count of what an operation has made or written; None: it is not
        known."""
        if output.is_complex() or (
            output.is_floating_point() and func not in _OF_FLOATS
        ):
            return None
        if func in _ZEROS:
            return 0
        if func is _aten.eq.Tensor:
            return _matches(inputs, output)
        counts = [self.of(tensor) for tensor in inputs] if self._counts else []
        stated = [count for count in counts if count is not None]
        if not stated:
            return None
        if func in _PRODUCTS:
            return min(stated)
        if counts[0] is not None and func in _WRITES:
            return counts[0] + _written_elements(func, args)
        if len(stated) == len(counts) and _keeps_zeros(func, args, kwargs):
            return sum(stated)
        return None


def _matches(inputs: list[Any], output: Any) -> int | None:
    """Return how many elements are equal at most, where each row is one number that is
    compared with several, as an encoding of classes is; None: it is none."""
    if len(inputs) != 2 or not output.dim():
        return None
    numbers, classes = inputs
    if classes.dim() != 1 or numbers.shape[-1:] != (1,) or len(classes) == 1:
        return None
    return int(output.numel() // len(classes))


def _written_elements(func: Any, args: Any) -> int:
    """Return the number of elements that are written at indices."""
    if func in _SCATTERS:
        return int(args[2].numel())
    target, indices = args[:2]
    shapes = [each.shape for each in indices if each is not None]
    kept = [
        size
        for dim, size in enumerate(target.shape)
        if dim >= len(indices) or indices[dim] is None
    ]
    return math.prod((*torch.broadcast_shapes(*shapes), *kept))


def _keeps_zeros(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation gives as many zeros as it is given."""
    if func in _COPIES:
        return True
    if torch.Tag.pointwise not in func.tags:
        return False

    def zero(tensor: Any) -> Any:
        return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype)

    try:
        args, kwargs = tree_map_only(torch.Tensor, zero, (args, kwargs))
        return not func(*args, **kwargs).any()
    except Exception:
        return False  # an operation that only a device has
