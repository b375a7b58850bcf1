"""Values of small fake tensors, as far as they follow from values that the job has."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ebbtide.features.dryrun.errors import DryRunFinished
from ebbtide.features.dryrun.failures import place_of_call
from ebbtide.features.dryrun.torch_2_13.operations.nonzero_counts import NonzeroCounts

_aten = torch.ops.aten
MAX_ELEMENTS = 65_536
# A job that reads so many unknown values in one iteration waits for one of them.
MAX_READS = 100_000
# Gradients count as finite: the flag that it writes keeps its value.
_FINITE_CHECK = _aten._amp_foreach_non_finite_check_and_unscale_.default
_RANDOM = torch.Tag.nondeterministic_seeded
_UNINITIALIZED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
    }
)
_REDUCTIONS = frozenset(
    {
        _aten.all.default,
        _aten.all.dim,
        _aten.all.dims,
        _aten.any.default,
        _aten.any.dim,
        _aten.any.dims,
        _aten._is_all_true.default,
        _aten._is_any_true.default,
    }
)
_POINTWISE = torch.Tag.pointwise
_NUMBERS = (torch.int32, torch.int64)
# Logical operation -> the truth of one argument that decides the result, whatever the
# other one is.
_DECISIVE = {
    **dict.fromkeys(
        (
            _aten.bitwise_and.Tensor,
            _aten.bitwise_and_.Tensor,
            _aten.logical_and.default,
        ),
        False,
    ),
    **dict.fromkeys(
        (_aten.bitwise_or.Tensor, _aten.bitwise_or_.Tensor, _aten.logical_or.default),
        True,
    ),
}
# In `deepspeed.zero.Init` those of the module make tensors on the device, in another
# data type.
_empty, _empty_strided, _full, _ones = (
    torch.empty,
    torch.empty_strided,
    torch.full,
    torch.ones,
)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operation, which are values or
    lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class ShadowValues:
    """Real storages beside fake ones. Jobs branch on masks, positions and steps, which
    rarely depend on weights.

    `placeholders` counts reads of values that are not known, by dtype, `reads` those
    since the last iteration; where these are too many, the job is ended."""

    def __init__(self) -> None:
        self.placeholders: Counter[str] = Counter()
        self.reads = 0
        self._conditions = Conditions(self.of)
        self.counts = NonzeroCounts()
        # Address of a fake storage -> (its real storage, the reference whose callback
        # removes the entry)
        self._storages: dict[int, tuple[Any, Any]] = {}

    def of(self, tensor: Any) -> Any:
        """Return a real tensor that shares the known values of a tensor; None if they
        are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return None
        return _empty(0, dtype=tensor.dtype).set_(
            entry[0], tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def value_of(self, tensor: Any) -> Any:
        """Return the value of a tensor with one element: 1.0, 1 or False by its dtype
        where it is not known."""
        real = self.of(tensor)
        if real is not None:
            return real.item()
        self._count_read(tensor, 1)
        return self._unknown(tensor)

    def array_of(self, tensor: Any) -> Any:
        """Return a real tensor with the values of a tensor, or with placeholders."""
        real = self.of(tensor)
        if real is None:
            self._count_read(tensor, tensor.numel())
            with _disable_current_modes():  # in which a large one would be fake
                real = _full(tensor.shape, self._unknown(tensor), dtype=tensor.dtype)
        return real

    def are_equal(self, one: Any, other: Any) -> bool:
        """Return whether two tensors have the same shape and values, with placeholders
        for those not known."""
        if one.shape != other.shape:
            return False
        reals = [self.of(tensor) for tensor in (one, other)]
        if None not in reals:
            return bool(torch.equal(*reals))
        self._count_read(one, 1)
        unknown = (
            _full((), self._unknown(tensor), dtype=tensor.dtype)
            if real is None
            else real
            for tensor, real in zip((one, other), reals, strict=True)
        )
        return bool(torch.eq(*unknown).all())

    def _unknown(self, tensor: Any) -> Any:
        condition = self._conditions.get(tensor) if tensor.dtype == torch.bool else None
        return _placeholder(tensor.dtype) if condition is None else condition

    def _count_read(self, tensor: Any, elements: int) -> None:
        self.placeholders[str(tensor.dtype).removeprefix("torch.")] += elements
        self.reads += 1
        if self.reads > MAX_READS:
            raise DryRunFinished(
                f"incomplete: the job read {MAX_READS:,} values that a dry run does "
                "not have without an optimizer "
                "step, as where it waits for one of them: end that loop after some "
                "rounds for the dry run; no trace "
                f"is written{place_of_call()}"
            )

    def set(self, tensor: Any, real: Any) -> None:
        """Set the values of a fake tensor whose storage is its own."""
        copy = _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if (
            tensor.storage_offset()
            or copy.untyped_storage().nbytes() != tensor.untyped_storage().nbytes()
        ):
            return
        copy.copy_(real)
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages[key] = (
            copy.untyped_storage(),
            weakref.ref(storage, lambda _: self._storages.pop(key, None)),
        )

    def compute(self, func: Any, args: Any, kwargs: Any, inputs: list[Any]) -> Any:
        """Return the real result of an operation; None where an input is not known, or
        values are random."""
        if _RANDOM in func.tags or func in _UNINITIALIZED:
            return None
        for tensor in inputs:
            if (
                isinstance(tensor, FakeTensor)
                and tensor.untyped_storage()._cdata not in self._storages
            ):
                return self._picked(func, args)
        args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return func(*args, **kwargs)
        except Exception:
            return None  # an operation that only a device has

    def _picked(self, func: Any, args: Any) -> Any:
        """Return numbers at positions that are not known, evenly spread over a list of
        known ones, as after a sampler; None if they are no such numbers."""
        index = args[-1]
        if func is _aten.index.Tensor and len(index) == 1:
            index = index[0]
        elif func is not _aten.index_select.default:
            return None
        real = self.of(args[0])
        if real is None or real.dim() != 1 or real.dtype not in _NUMBERS:
            return None
        last = max(len(real) - 1, 0)
        with _disable_current_modes():
            positions = torch.linspace(0, last, index.numel()).round().long()
            return real[positions].reshape(index.shape) if len(real) else None

    def follow(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Any], outputs: list[Any]
    ) -> None:
        """Compute the values of what an operation has made or written, and forget those
        that are not known now."""
        large = any(tensor.numel() > MAX_ELEMENTS for tensor in outputs)
        result = None if large else self.compute(func, args, kwargs, inputs)
        if result is None:
            decided = self._decided(func, args, outputs)
            count = None
            if len(outputs) == 1:
                count = self.counts.after(func, args, kwargs, inputs, outputs[0])
            if func is not _FINITE_CHECK:
                self._forget_written(func, args, kwargs)
            if count is not None:
                self.counts.set(outputs[0], count)
            self._conditions.follow(func, args, kwargs, outputs)
            if decided is None:
                return
            result = decided
        for output, real in zip(outputs, tensors_in((result,)), strict=False):
            if (
                isinstance(output, FakeTensor)
                and output.untyped_storage()._cdata not in self._storages
            ):
                self.set(output, real)

    def _decided(self, func: Any, args: Any, outputs: list[Any]) -> Any:
        """Return the result of a logical operation that one known argument decides;
        None: none does."""
        decisive = _DECISIVE.get(func)
        for real in (
            map(self.of, args)
            if decisive is not None and outputs[0].numel() <= MAX_ELEMENTS
            else ()
        ):
            if (
                isinstance(real, torch.Tensor)
                and real.dtype == torch.bool
                and bool((real == decisive).all())
            ):
                return _full(outputs[0].shape, decisive, dtype=outputs[0].dtype)
        return None

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget the values of tensors, since something else is written to them."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self._storages.pop(tensor.untyped_storage()._cdata, None)
                self._conditions.forget(tensor)
                self.counts.forget(tensor)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        if not func._schema.is_mutable or not (
            self._storages or self._conditions or self.counts
        ):
            return
        positions, names = written_arguments(func)
        written = [args[position] for position in positions if position < len(args)]
        written += [kwargs[name] for name in names if name in kwargs]
        self.forget(tensors_in(written))


def _placeholder(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return 1.0
    if dtype.is_complex:
        return 1.0 + 0.0j
    return False if dtype == torch.bool else 1


@cache
def written_arguments(func: Any) -> tuple[list[int], list[str]]:
    """Return positions and names of the arguments that an operation writes."""
    arguments = func._schema.arguments
    written = [
        number
        for number, item in enumerate(arguments)
        if item.alias_info and item.alias_info.is_write
    ]
    return written, [arguments[number].name for number in written]


class Conditions:
    """Boolean tensors whose elements are all the same if every unknown number is 1.

    So `isfinite` is true, `isnan` is false, and a comparison agrees with the
    placeholder that `.item()` gives.

    `real_of`: returns a real tensor with the values of a tensor; None if they are not
    known."""

    def __init__(self, real_of: Callable[[Any], Any]) -> None:
        self._real_of = real_of
        # Address of a storage -> (the value, the reference whose callback removes the
        # entry)
        self._values: dict[int, tuple[bool, Any]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, tensor: Any) -> bool | None:
        """Return the value of all elements of a boolean tensor; None if it is not
        known."""
        entry = self._values.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def forget(self, tensor: Any) -> None:
        """Forget the values of a tensor that is written."""
        self._values.pop(tensor.untyped_storage()._cdata, None)

    def follow(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """Compute a condition that an operation has made, by one element in place of
        each argument."""
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
        self._values[key] = (
            value,
            weakref.ref(storage, lambda _: self._values.pop(key, None)),
        )

    def _element(self, tensor: Any) -> Any:
        real = self._real_of(tensor)
        shape = (1,) * tensor.dim()
        if real is not None:
            if real.numel() != 1:
                raise LookupError
            return real
        if tensor.dtype != torch.bool:
            return _ones(shape, dtype=tensor.dtype)
        value = self.get(tensor)
        if value is None:
            raise LookupError
        return _full(shape, value)
