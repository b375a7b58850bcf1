"""Sparse tensors of the device (COO), as operations on their indices and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from ebbtide.features.dryrun.errors import CannotFakeError
from ebbtide.features.dryrun.torch_2_13.operations.kernel_work import tensor_bytes
from ebbtide.features.dryrun.torch_2_13.operations.storages import FollowedStorages
from ebbtide.machines.kernels.rates import KernelWork
from ebbtide.machines.kernels.time_priors import WorkClass

_aten = torch.ops.aten
_MAKES = frozenset(
    {
        _aten._sparse_coo_tensor_with_dims_and_tensors.default,
        _aten._sparse_coo_tensor_with_dims.default,
    }
)
_TRANSPOSES = frozenset({_aten.t.default, _aten.transpose.int})
_TO_SPARSE = frozenset({_aten._to_sparse.default, _aten._to_sparse.sparse_dim})


def is_sparse(tensor: Any) -> bool:
    """Return whether a tensor has indices and values."""
    return tensor.layout is torch.sparse_coo


class SparseTensors:
    """Runs operations on sparse tensors in a mode, which follows the tensors that they
    consist of.

    Each nonzero element that an operation may give counts: coalescing joins none.
    """

    def __init__(self, mode: Any, storages: FollowedStorages) -> None:
        self._mode, self._fake_mode = mode, mode.fake_mode
        self._storages = storages
        self._rules: dict[Any, Callable[..., Any]] = {
            _aten.clone.default: self._copy,
            _aten._coalesce.default: self._coalesce,
            **dict.fromkeys(_TRANSPOSES, self._transpose),
            **dict.fromkeys(_TO_SPARSE, self._convert),
            _aten._to_copy.default: self._move,
            _aten.add.Tensor: self._add,
            _aten.add_.Tensor: self._add_in_place,
            _aten.sparse_mask.default: self._mask,
            _aten._to_dense.default: self._to_dense,
            _aten.mm.default: self._multiply,
            _aten._sparse_mm.default: self._multiply,
            _aten.addmm.default: self._multiply_and_add,
            _aten._sparse_addmm.default: self._multiply_and_add,
        }

    def take(self, func: Any, inputs: Iterable[Any]) -> bool:
        """Return whether an operation takes or makes a sparse tensor."""
        return func in _MAKES or func in _TO_SPARSE or any(map(is_sparse, inputs))

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation."""
        rule = self._rules.get(func)
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = self._change_values(func, args)
        if rule is not None:
            with self._mode:
                return rule(*args, **kwargs)
        try:
            result = self._fake_mode.dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException as error:
            raise _refusal(func) from error
        sparse = [each for each in args if isinstance(each, torch.Tensor)]
        if func not in _MAKES and _lost(sparse, result):
            raise _refusal(func)
        return result

    def parts(self, tensor: Any) -> tuple[Any, Any]:
        """Return indices and values."""
        if not isinstance(tensor, FakeTensor):
            return tensor._indices(), tensor._values()
        with self._fake_mode:
            return tensor._indices(), tensor._values()

    def _is_coalesced(self, tensor: Any) -> bool:
        with self._fake_mode:
            return bool(tensor.is_coalesced())

    def _make(
        self, shape: Iterable[int], indices: Any, values: Any, is_coalesced: bool
    ) -> Any:
        """Return a sparse tensor of indices and values, which are followed already."""
        with _disable_current_modes(), self._fake_mode:
            return _aten._sparse_coo_tensor_with_dims_and_tensors(
                indices.shape[0],
                values.dim() - 1,
                list(shape),
                indices,
                values,
                dtype=values.dtype,
                layout=torch.sparse_coo,
                device=values.device,
                is_coalesced=is_coalesced,
            )

    def _copy(self, tensor: Any, **_kwargs: Any) -> Any:
        indices, values = self.parts(tensor)
        is_coalesced = self._is_coalesced(tensor)
        return self._make(tensor.shape, indices.clone(), values.clone(), is_coalesced)

    def _coalesce(self, tensor: Any) -> Any:
        indices, values = self.parts(tensor)
        return self._make(tensor.shape, indices.clone(), values.clone(), True)

    def _move(self, tensor: Any, **kwargs: Any) -> Any:
        indices, values = self.parts(tensor)
        kwargs = {key: value for key, value in kwargs.items() if key != "layout"}
        moved = indices.to(kwargs.get("device"), copy=True)
        is_coalesced = self._is_coalesced(tensor)
        copied = _aten._to_copy(values, **kwargs)
        return self._make(tensor.shape, moved, copied, is_coalesced)

    def _transpose(self, tensor: Any, one: int = 0, other: int = 1) -> Any:
        indices, values = self.parts(tensor)
        shape = list(tensor.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return self._make(shape, indices.clone(), values.clone(), False)

    def _convert(self, tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
        positions = tensor.nonzero()
        values = tensor[positions.unbind(1)]
        return self._make(tensor.shape, positions.t(), values, True)

    def _change_values(self, func: Any, args: Any) -> Callable[..., Any] | None:
        """Return an operation on each element, with a number, as one on the values."""
        tensor, *others = args
        tensors = [each for each in others if isinstance(each, torch.Tensor)]
        if not is_sparse(tensor) or any(each.dim() for each in tensors):
            return None

        def change(tensor: Any, *others: Any, **kwargs: Any) -> Any:
            indices, values = self.parts(tensor)
            changed = func(values, *others, **kwargs)
            if func._schema.is_mutable:
                return tensor
            is_coalesced = self._is_coalesced(tensor)
            return self._make(tensor.shape, indices.clone(), changed, is_coalesced)

        return change if func not in (_aten.add.Tensor, _aten.add_.Tensor) else None

    def _add(self, one: Any, other: Any, alpha: float = 1) -> Any:
        if not is_sparse(one):
            return self._add_in_place(one.clone(), other, alpha)
        if not is_sparse(other):
            return self._add_in_place(other.clone(), one)
        parts = zip(self.parts(one), self.parts(other), strict=True)
        indices, values = (
            torch.cat(pair, dim) for pair, dim in zip(parts, (1, 0), strict=True)
        )
        return self._make(one.shape, indices, values, False)

    def _add_in_place(self, one: Any, other: Any, alpha: float = 1) -> Any:
        if is_sparse(one):
            return self._replace(one, self._add(one, other, alpha))
        indices, values = self.parts(other)
        # its kernel sorts nothing, unlike that of index_put_
        self._charge("add_", indices, 3 * tensor_bytes(values))
        self._mode.values.forget([one])
        return one

    def _replace(self, tensor: Any, content: Any) -> Any:
        """Give a sparse tensor the indices and values of another one."""
        with _disable_current_modes(), self._fake_mode:
            _aten.copy_sparse_to_sparse_(tensor, content)
        for old, new in zip(self.parts(content), self.parts(tensor), strict=True):
            self._storages.take_over(old.untyped_storage(), new.untyped_storage())
        return tensor

    def _mask(self, dense: Any, mask: Any) -> Any:
        indices, _ = self.parts(mask)
        values = dense[tuple(indices.unbind(0))]
        return self._make(dense.shape, indices.clone(), values, True)

    def _to_dense(self, tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
        _, values = self.parts(tensor)
        return self._add_in_place(values.new_zeros(tensor.shape), tensor)

    def _multiply(self, one: Any, other: Any) -> Any:
        if not is_sparse(one) or is_sparse(other):
            raise CannotFakeError(
                "cannot dry-run aten.mm: of its arguments the first alone may be "
                "sparse: take dense ones for the dry run"
            )
        result = other.new_empty(one.shape[0], other.shape[1])
        # each element gathers a row
        indices, values = self.parts(one)
        gathered = len(values) * other.shape[1] * other.element_size()
        size = sum(map(tensor_bytes, (values, result))) + gathered
        self._charge("mm", indices, size)
        return result

    def _charge(self, name: str, indices: Any, size: int) -> None:
        """Charge a kernel that reads indices and moves so many further bytes."""
        size += tensor_bytes(indices)
        work = KernelWork(f"aten::{name}", "compute", WorkClass.INDEXED, 0.0, size)
        self._mode.follow_kernel(work, [])

    def _multiply_and_add(self, added: Any, one: Any, other: Any, **_: Any) -> Any:
        return self._multiply(one, other).add_(added)


def _refusal(func: Any) -> CannotFakeError:
    return CannotFakeError(
        f"cannot dry-run {func}: it has no form for sparse tensors: leave it out for "
        "the dry run, or take dense ones"
    )


def _lost(tensors: list[Any], result: Any) -> bool:
    """Return whether a result has no elements, though its arguments have."""
    return (
        isinstance(result, torch.Tensor)
        and is_sparse(result)
        and not result._nnz()
        and any(each._nnz() for each in tensors if is_sparse(each))
    )
