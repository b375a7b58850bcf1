"""Memory that kernels of CUDA take from the caching allocator beside the tensors of the
job."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.features.dryrun.memory.convolutions import CONVOLUTIONS, convolution_bytes
from ebbtide.features.dryrun.memory.device_memory import CallStacks, DeviceMemory

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
# parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp; the larger one on
# Hopper and Blackwell.
_LARGE_BYTES = 4096 * 8 * 1024
_SMALL_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_CAPABILITIES = (9, 10, 12)
_PARTS = re.compile(r":(\d+):(\d+)")
# Multiprocessors of a GPU by a part of its name, from its data sheet; those of an H100
# SXM for others.
_MULTIPROCESSORS = {
    "a100": 108,
    "a10": 72,
    "rtx3060": 28,
    "rtx4060": 24,
    "rtx3090": 82,
    "rtx4090": 128,
    "rtx5090": 170,
    "l40s": 142,
    "h100pcie": 114,
    "b200": 148,
    "v100": 80,
    "mi300x": 304,
}
_H100_MULTIPROCESSORS = 132
# Most threads on a multiprocessor by compute capability, from the CUDA C++ Programming
# Guide.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_MOST_THREADS = 2048
_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_VECTOR = 4
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


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of a workspace of cuBLAS on a device of a compute capability.

    `CUBLAS_WORKSPACE_CONFIG` sets another size. cuBLASLt uses the same workspace
    (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`).
    """
    parts = _PARTS.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if parts:
        return sum(1024 * int(size) * int(count) for size, count in parts)
    return _LARGE_BYTES if capability[0] in _LARGE_CAPABILITIES else _SMALL_BYTES


def multiprocessors(device_name: str, capability: tuple[int, int]) -> Multiprocessors:
    """Return the multiprocessors of a GPU, by the name that torch reports."""
    name = re.sub(r"[^a-z0-9]", "", device_name.lower())
    counts = (count for part, count in _MULTIPROCESSORS.items() if part in name)
    return Multiprocessors(
        next(counts, _H100_MULTIPROCESSORS), _THREADS.get(capability, _MOST_THREADS)
    )


class KernelWorkspaces:
    """Accounts for the memory that kernels take.

    cuBLAS takes a workspace at the first matrix product of each thread, the job's own
    and that of autograd, and keeps it. Reductions, writes at indices, and convolutions
    take buffers while they run."""

    def __init__(
        self,
        memory: DeviceMemory,
        stacks: CallStacks,
        capability: tuple[int, int],
        gpu: Multiprocessors,
    ) -> None:
        self._memory, self._stacks, self._capability, self._gpu = (
            memory,
            stacks,
            capability,
            gpu,
        )
        self._size = workspace_bytes(capability)
        self._threads: set[bool] = set()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Account for an operation on the device that has just made its result."""
        kind = func._overloadpacket
        if kind in _MATRIX_PRODUCTS:
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward not in self._threads:
                self._threads.add(in_backward)
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


@dataclass(frozen=True)
class Multiprocessors:
    """The streaming multiprocessors of a GPU: how many, and the most threads on each at
    once."""

    count: int
    threads: int


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
    return buffers + _global_buffers(source, dims, item, value_bytes, gpu)


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


def _global_buffers(
    source: Any, dims: set[int], item: int, value_bytes: int, gpu: Multiprocessors
) -> list[int]:
    """Return the bytes of the intermediate values and of the semaphores; nothing if
    blocks work alone."""
    reduced, kept = _iteration(source, dims)
    outputs = math.prod(size for size, *_ in kept)
    inputs = math.prod(size for size, *_ in reduced)
    ndim = len(reduced) + len(kept)
    along_input = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    vector = 1
    if along_input:
        width, height = inputs, outputs
        if ndim == 1 and reduced[0][1] == 1 and width > 128:
            width //= _VECTOR
    else:
        width, height = outputs, inputs
        if kept[0][1] == 1:
            vector = _output_vector(reduced, kept)
            width //= vector
    block_width, block_height = _block(width, height, _MAX_THREADS // vector)
    step_input = block_width if along_input else 1
    step_output = 1 if along_input else block_width
    values = _ceil(inputs, step_input)
    across_warps = values >= min(block_height * 16, _MAX_VALUES_PER_THREAD)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values = _ceil(inputs, step_input)
    grid = _ceil(_ceil(outputs, vector), step_output)
    target = gpu.count * (gpu.threads // (block_width * block_height))
    if not across_warps or values < _MAX_VALUES_PER_THREAD or grid > target:
        return []
    blocks = min(_ceil(target, grid), _ceil(values, _MIN_VALUES_PER_THREAD))
    blocks = max(blocks, _ceil(values, _MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return []
    size = value_bytes * outputs * blocks * (1 if along_input else block_width * vector)
    return [size, 4 * grid]


def _iteration(
    source: Any, dims: set[int]
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the reduced and the kept dimensions as TensorIterator orders and joins
    them: size, strides in and out."""
    shape, strides = source.shape, source.stride()
    out_strides, step = {}, 1
    for dim in reversed(range(source.dim())):
        if dim not in dims:
            out_strides[dim] = step
            step *= shape[dim]
    sized = [dim for dim in range(source.dim()) if shape[dim] != 1]
    reduced = sorted((strides[dim], shape[dim]) for dim in sized if dim in dims)
    kept = sorted(
        (out_strides[dim], strides[dim], shape[dim]) for dim in sized if dim not in dims
    )
    return _joined([(size, stride, 0) for stride, size in reduced]), _joined(
        [(z, s, o) for o, s, z in kept]
    )


def _joined(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for size, stride, out_stride in dims:
        if joined:
            last_size, last_stride, last_out = joined[-1]
            if last_size * last_stride == stride and last_size * last_out == out_stride:
                joined[-1] = last_size * size, last_stride, last_out
                continue
        joined.append((size, stride, out_stride))
    return joined


def _output_vector(
    reduced: list[tuple[int, int, int]], kept: list[tuple[int, int, int]]
) -> int:
    vector = _VECTOR
    for number in (kept[0][0], *(stride for _, stride, _ in [*reduced, *kept[1:]])):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    wide, high = (min(_last_power_of_two(size), threads) for size in (width, height))
    block_width = min(wide, _WARP)
    block_height = min(high, threads // block_width)
    return min(wide, threads // block_height), block_height


def _last_power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
