"""Calls of operations on fake tensors: what follows from the shapes of their arguments
is computed once."""

from collections.abc import Collection
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Arguments that are hashed by value.
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_DEPENDENT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
# It has the tag for masks, which are positions by now
# (`UnknownShapes.without_boolean_index`).
_index = torch.ops.aten.index.Tensor
# The job, and `deepspeed.zero.Init`, may replace these.
_dispatch_keys, _default_dtype, _in_inference = (
    torch._C._dispatch_keys, torch.get_default_dtype, torch.is_inference_mode_enabled,
)  # fmt: skip
_empty_strided, _make_subclass = torch.empty_strided, torch._C.TensorBase._make_subclass
_precision, _has_cudnn = (
    torch._C._get_fp32_precision_getter,
    torch._C._get_cudnn_enabled,
)


class _Result(NamedTuple):
    """A tensor that an operation returns.

    `source`: the position among the tensors of the arguments of the one that it is
    (`is_source`) or whose memory it has; None: it has its own."""

    source: int | None
    is_source: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]

    def again(self, inputs: list[Any]) -> Any:
        """Return such a tensor, of another call."""
        source = None if self.source is None else inputs[self.source]
        if self.is_source:
            return source
        content = _empty_strided(
            self.shape, self.stride, dtype=self.dtype, device="meta"
        )
        if source is not None:
            content.set_(source.untyped_storage(), self.offset, self.shape, self.stride)
        tensor = _make_subclass(
            FakeTensor,
            content,
            False,
            dispatch_device=True,
            device_for_backend_keys=self.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(self.attributes)
        return tensor


class KnownCall(NamedTuple):
    """A call: what every call of the operation with such arguments has in common.

    `container`: the type of its result, `tuple` or `list`; None: one value. `effects`:
    what else follows from it."""

    container: Any
    results: list[Any]
    effects: Any

    def again(self, inputs: list[Any]) -> Any:
        """Return the result of a call with other tensors, in the order of its
        arguments."""
        results = [
            one.again(inputs) if isinstance(one, _Result) else one
            for one in self.results
        ]
        return results[0] if self.container is None else self.container(results)


class KnownCalls:
    """The calls so far of torch's own operations whose results follow from their
    arguments without values.

    Torch has such a cache, too; this one takes a fifth of its time, and knows more
    calls, such as calls of views."""

    def __init__(self, fake_mode: FakeTensorMode, device_attribute: str) -> None:
        self._fake_mode = fake_mode
        self._device_of = attrgetter(device_attribute)
        self._calls: dict[Any, KnownCall] = {}

    def key(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Any]
    ) -> tuple[Any, ...] | None:
        """Return what a call has in common with equal ones; None if that is not known.
        `inputs`: tensors in order."""
        if not is_builtin(func) or (
            func._schema.is_mutable and len(set(map(id, inputs))) < len(inputs)
        ):
            return None
        precisions = _precision("cuda", "matmul"), _precision("cuda", "conv")
        key = [func._op, _default_dtype(), _in_inference(), *precisions, _has_cudnn()]
        if not self._describe(args, key):
            return None
        if kwargs:
            key += kwargs
            if not self._describe(kwargs.values(), key):
                return None
        return tuple(key)

    def find(self, key: Any) -> KnownCall | None:
        return self._calls.get(key)

    def add(
        self, key: Any, func: Any, result: Any, inputs: list[Any], effects: Any
    ) -> None:
        """Add a call that has just been made, unless others may have another result."""
        if func is not _index and not _DEPENDENT.isdisjoint(func.tags):
            return
        container = (
            list
            if isinstance(result, list)
            else tuple
            if isinstance(result, tuple)
            else None
        )
        try:
            results = [
                _result_of(value, inputs)
                for value in ([result] if container is None else result)
            ]
        except LookupError:
            return
        self._calls[key] = KnownCall(container, results, effects)

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
                    value.dtype, value.shape, value.stride(), value.storage_offset(),
                    self._device_of(value),
                    value.requires_grad, _dispatch_keys(value).raw_repr(),
                )  # fmt: skip
            elif (kind is not list and kind is not tuple) or not self._describe(
                value, key
            ):
                return False
        return True


def _result_of(value: Any, inputs: list[Any]) -> Any:
    """Return how to make a value of a result again.

    Raises:
        LookupError: That is not known.
    """
    if type(value) in _PLAIN:
        return value
    if (
        type(value) is not FakeTensor
        or value.constant is not None
        or value.layout is not torch.strided
    ):
        raise LookupError
    storage = value.untyped_storage()
    is_source = [number for number, tensor in enumerate(inputs) if tensor is value]
    sources = is_source or [
        n
        for n, tensor in enumerate(inputs)
        if tensor.untyped_storage()._cdata == storage._cdata
    ]
    shape, stride = value.shape, value.stride()
    # Views of other tensors are no inference tensors in inference mode, either.
    is_special = (
        value.is_conj() or value.is_neg() or value.is_inference() != _in_inference()
    )
    if len(sources) > 1 or is_special or value.requires_grad > bool(is_source):
        raise LookupError
    if (
        not sources
        and _empty_strided(shape, stride, dtype=value.dtype, device="meta")
        .untyped_storage()
        .nbytes()
        != storage.nbytes()
    ):
        raise LookupError
    source = sources[0] if sources else None
    return _Result(
        source,
        bool(is_source),
        shape,
        stride,
        value.storage_offset(),
        value.dtype,
        value.fake_device,
        dict(vars(value)),
    )
