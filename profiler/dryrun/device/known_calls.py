"""Calls of operations on fake tensors: what follows from the shapes of their arguments is computed once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Arguments that are hashed by value.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.inplace_view)
# The job, and `deepspeed.zero.Init`, may replace these.
_dispatch_keys, _default_dtype, _in_inference = (
    torch._C._dispatch_keys, torch.get_default_dtype, torch.is_inference_mode_enabled,
)  # fmt: skip
_empty_strided, _make_subclass = torch.empty_strided, torch._C.TensorBase._make_subclass


class _Result(NamedTuple):
    """A tensor that an operation returns.

    `source`: the position among the tensors of the arguments of the one that it is (`is_source`) or whose memory it
    has; None: it has its own.
    """

    source: int | None
    is_source: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    attributes: dict[str, Any]

    def again(self, inputs: list[Any]) -> Any:
        """Return such a tensor, of another call."""
        source = None if self.source is None else inputs[self.source]
        if self.is_source:
            return source
        content = _empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if source is not None:
            content.set_(source.untyped_storage(), self.offset, self.shape, self.stride)
        device = self.attributes["_fake_device"]
        tensor = _make_subclass(
            FakeTensor, content, self.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(self.attributes)
        return tensor


@dataclass(slots=True)
class KnownCall:
    """A call, and what every call of the operation with such arguments has in common.

    Attributes:
        func: The operation, which stays, as its address stands for it.
        container: The type of its result, `tuple` or `list`; None: one value.
        effects: What else follows from it; None until that is known.
    """

    func: Any
    container: Any
    results: list[Any]
    effects: Any = None

    def again(self, inputs: list[Any]) -> Any:
        """Return the result of a call with other tensors, those of its arguments in order."""
        results = [one.again(inputs) if isinstance(one, _Result) else one for one in self.results]
        return results[0] if self.container is None else self.container(results)


class KnownCalls:
    """The calls so far.

    Torch has such a cache, too; this one takes a fifth of its time, and knows more calls, such as those of views.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._calls: dict[tuple[Any, ...], KnownCall] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Return what a call has in common with equal ones; None if that is not known."""
        key: list[Any] = [id(func), _default_dtype(), _in_inference()]
        if not self._describe(args, key):
            return None
        if kwargs:
            key += kwargs
            if not self._describe(kwargs.values(), key):
                return None
        return tuple(key)

    def find(self, key: Any) -> KnownCall | None:
        return self._calls.get(key)

    def add(self, key: tuple[Any, ...], func: Any, result: Any, inputs: list[Any]) -> KnownCall | None:
        """Add a call that has just been made, and return it; None if others may have another result."""
        container = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
        results = [result] if container is None else result
        if any(tag in func.tags for tag in _DEPENDENT) or (func._schema.is_mutable and _repeat(inputs)):
            return None
        try:
            made = [_result_of(value, inputs) for value in results]
        except LookupError:
            return None
        call = self._calls[key] = KnownCall(func, container, made)
        return call

    def _describe(self, values: Collection[Any], key: list[Any]) -> bool:
        key.append(len(values))
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                key += (kind, value)
            elif isinstance(value, FakeTensor):
                if value.constant is not None or value.fake_mode is not self._fake_mode:
                    return False
                key += (
                    value.dtype, value.shape, value.stride(), value.storage_offset(), value._fake_device,
                    value.requires_grad, _dispatch_keys(value).raw_repr(),
                )  # fmt: skip
            elif (kind is not list and kind is not tuple) or not self._describe(value, key):
                return False
        return True


def _repeat(tensors: list[Any]) -> bool:
    return len({id(tensor) for tensor in tensors}) < len(tensors)


def _result_of(value: Any, inputs: list[Any]) -> Any:
    """Return how to make a value of a result again.

    Raises:
        LookupError: That is not known.
    """
    if type(value) in _PLAIN:
        return value
    if not isinstance(value, torch.Tensor):
        raise LookupError
    is_source = [number for number, tensor in enumerate(inputs) if tensor is value]
    storage = value.untyped_storage()._cdata
    sources = is_source or [n for n, tensor in enumerate(inputs) if tensor.untyped_storage()._cdata == storage]
    is_plain = type(value) is FakeTensor and value.constant is None and value.layout is torch.strided
    if len(sources) > 1 or not (is_source or is_plain) or value.is_conj() or value.is_neg():
        raise LookupError
    return _Result(
        sources[0] if sources else None,
        bool(is_source),
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.requires_grad,
        dict(vars(value)),
    )
