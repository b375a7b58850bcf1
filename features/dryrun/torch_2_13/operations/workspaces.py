"""Memory that kernels of CUDA take from the caching allocator beside the tensors of the
job."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.features.dryrun.gpu import FakedGpu
from ebbtide.features.dryrun.memory.call_stacks import CallStacks
from ebbtide.features.dryrun.memory.device_memory import DeviceMemory
from ebbtide.features.dryrun.memory.kernel_buffers import (
    Multiprocessors,
    intermediate_buffers,
    workspace_bytes,
)
from ebbtide.features.dryrun.torch_2_13.operations.convolutions import (
    CONVOLUTIONS,
    convolution_bytes,
)

_aten = torch.ops.aten
INDEX_WRITES = frozenset(
    {
        _aten.index_put,
        _aten.index_put_,
        _aten._index_put_impl_,
        _aten.embedding_dense_backward,
    }
)
_INDEX_BYTES = 8
# Up to so many indices, the gradient of an embedding is added without sorting.
_UNSORTED = 3072
_MATRIX_PRODUCTS = frozenset(
    {
        _aten.mm,
        _aten.bmm,
        _aten.addmm,
        _aten.baddbmm,
        _aten.mv,
        _aten.addmv,
        _aten.dot,
        _aten._scaled_mm,
    }
)
# Bytes of an intermediate value: a pair of a value and an index, or the four figures of
# Welford's algorithm.
_PAIR_BYTES = _WELFORD_BYTES = 16
_SUMS = frozenset(
    {
        _aten.sum,
        _aten.nansum,
        _aten.mean,
        _aten.prod,
        _aten.linalg_vector_norm,
        _aten.norm,
    }
)
_EXTREMES = frozenset({_aten.amax, _aten.amin})
_WITH_INDEX = frozenset({_aten.max, _aten.min, _aten.argmax, _aten.argmin})
_VARIANCES = frozenset({_aten.var, _aten.std, _aten.var_mean, _aten.std_mean})
REDUCTIONS = _SUMS | _EXTREMES | _WITH_INDEX | _VARIANCES
_SMALL_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)


def index_buffers(kind: Any, args: Any) -> list[int]:
    """Return the bytes of the buffers that an operation of INDEX_WRITES takes while it
    runs, in their order.

    The rules are those of `index_put_with_sort_kernel` in
    aten/src/ATen/native/cuda/Indexing.cu, and of `embedding_dense_backward_cuda` in
    Embedding.cu."""
    if kind is _aten.embedding_dense_backward:
        count = args[1].numel()
        return [_INDEX_BYTES * count] * 3 if count > _UNSORTED else []
    target, indices, values = (
        args[0],
        [index for index in args[1] if index is not None],
        args[2],
    )
    if len(args) < 4 or not args[3] or not indices:
        return []
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    linear = [_INDEX_BYTES * count] * 2
    wanted = count * target.shape[len(indices) :].numel()
    expanded = [] if values.numel() == wanted else [wanted * values.element_size()]
    return [*linear, *expanded, *[_INDEX_BYTES * count] * 3]


class KernelWorkspaces:
    """Accounts for the memory that kernels take.

    cuBLAS takes a workspace at the first matrix product of each thread, the job's own
    and autograd's, and keeps it. Reductions, writes at indices, and convolutions
    take buffers while they run."""

    def __init__(
        self,
        memory: DeviceMemory,
        stacks: CallStacks,
        gpu: FakedGpu,
    ) -> None:
        self._memory, self._stacks = memory, stacks
        self._capability, self._gpu = gpu.capability, gpu.multiprocessors
        self._size = workspace_bytes(gpu.capability)
        # Those that have workspaces: a device, and whether it is autograd's thread.
        self._threads: set[tuple[int, bool]] = set()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Account for an operation on the device that has just made its result."""
        kind = func._overloadpacket
        if kind in _MATRIX_PRODUCTS:
            in_backward = torch._C._current_graph_task_id() != -1
            thread = self._memory.device, in_backward
            if thread not in self._threads:
                self._threads.add(thread)
                self._memory.add_workspace(self._size, self._stacks.current())
            return
        if kind in CONVOLUTIONS:
            self._memory.add_convolution(
                convolution_bytes(kind, args, self._capability), self._stacks.current()
            )
            return
        if kind in REDUCTIONS:
            buffers = reduction_buffers(func, args, kwargs, result, self._gpu)
        elif kind in INDEX_WRITES:
            buffers = index_buffers(kind, args)
        else:
            return
        if buffers:
            self._memory.add_temporaries(buffers, self._stacks.current())


def reduction_buffers(
    func: Any, args: Any, kwargs: Any, result: Any, gpu: Multiprocessors
) -> list[int]:
    """Return the bytes of the buffers that an operation of REDUCTIONS takes while it
    runs, in their order."""
    source = args[0]
    output = result[0] if isinstance(result, tuple | list) else result
    if (
        not isinstance(source, torch.Tensor)
        or not isinstance(output, torch.Tensor)
        or not source.numel()
    ):
        return []
    kind = func._overloadpacket
    buffers = []
    item = source.element_size()
    if kind in (_aten.sum, _aten.prod) and source.dtype in _SMALL_INTEGERS:
        item = _INDEX_BYTES  # these are converted first
        buffers.append(source.numel() * item)
    if (
        kind in _WITH_INDEX
        and not isinstance(result, tuple | list)
        and kind in (_aten.max, _aten.min)
    ):
        value_bytes = item
    elif kind in _WITH_INDEX:
        value_bytes = _PAIR_BYTES
    elif kind in _VARIANCES:
        value_bytes = _WELFORD_BYTES
    else:
        value_bytes = item if kind in _EXTREMES else max(4, item)
    dims = _reduced_dims(func, args, kwargs, source.dim())
    return buffers + intermediate_buffers(
        source.shape, source.stride(), dims, value_bytes, gpu
    )


def _reduced_dims(func: Any, args: Any, kwargs: Any, ndim: int) -> set[int]:
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = values.get("dim")
    if dims is None or dims == []:
        return set(range(ndim))
    return (
        {dim % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])}
        if ndim
        else set()
    )
