"""Conditions on values that are not known, such as `loss.isnan()` and `norm < limit`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    {_aten.all.default, _aten.all.dim, _aten.all.dims, _aten.any.default, _aten.any.dim, _aten.any.dims}
)
_POINTWISE = torch.Tag.pointwise


class Conditions:
    """Boolean tensors whose elements are all the same if every unknown number is 1.

    So `isfinite` is true, `isnan` is false, and a comparison agrees with the placeholder that `.item()` gives.

    Args:
        real_of: Returns a real tensor with the values of a tensor; None if they are not known.
    """

    def __init__(self, real_of: Callable[[Any], Any]) -> None:
        self._real_of = real_of
        # Address of a storage -> (the value, the reference whose callback removes the entry)
        self._values: dict[int, tuple[bool, Any]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, tensor: Any) -> bool | None:
        """Return the value of all elements of a boolean tensor; None if it is not known."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def forget(self, tensor: Any) -> None:
        """Forget the values of a tensor that is written."""
        self._values.pop(tensor.untyped_storage()._cdata, None)

    def follow(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """Compute a condition that an operation has made, by one element in place of each argument."""
        if len(outputs) != 1 or outputs[0].dtype != torch.bool:
            return
        if func not in _REDUCTIONS and _POINTWISE not in func.tags:
            return
        try:
            args, kwargs = tree_map_only(torch.Tensor, self._element, (args, kwargs))
            value = bool(func(*args, **kwargs).flatten()[0])
        except Exception:
            return  # an argument that is not known to be uniform
        storage = outputs[0].untyped_storage()
        key = storage._cdata
        self._values[key] = value, weakref.ref(storage, lambda _: self._values.pop(key, None))

    def _element(self, tensor: Any) -> Any:
        real = self._real_of(tensor)
        shape = (1,) * tensor.dim()
        if real is not None:
            if real.numel() != 1:
                raise LookupError
            return real
        if tensor.dtype != torch.bool:
            return torch.ones(shape, dtype=tensor.dtype)
        value = self.get(tensor)
        if value is None:
            raise LookupError
        return torch.full(shape, value)
