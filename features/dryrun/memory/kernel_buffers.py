"""Memory that kernels of CUDA take from the caching allocator beside the tensors of the
job, by the sizes of what they work on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.machines.sheets import plain_name, preset_of

# parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp; the larger one on
# Hopper and Blackwell.
_LARGE_BYTES = 4096 * 8 * 1024
_SMALL_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_CAPABILITIES = (9, 10, 12)
_PARTS = re.compile(r":(\d+):(\d+)")
# Multiprocessors of GPUs without a preset by a part of their name, the longest one,
# from data sheets; those of an H100 SXM for others.
_MULTIPROCESSORS = {
    "p100": 56, "titanrtx": 72, "rtx2080ti": 68, "a30": 56, "a4000": 48, "a5000": 64,
    "rtx3060ti": 38, "rtx3070": 46, "rtx3090ti": 84, "rtx4070ti": 60, "l40": 142,
    "a100": 108, "v100": 80, "rtx5070": 48,
}  # fmt: skip
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
    name = plain_name(device_name)
    sheet = preset_of(device_name)
    count = None if sheet is None else sheet.multiprocessors
    if count is None:
        parts = [part for part in _MULTIPROCESSORS if part in name]
        longest = max(parts, key=len, default="")
        count = _MULTIPROCESSORS.get(longest, _H100_MULTIPROCESSORS)
    return Multiprocessors(count, _THREADS.get(capability, _MOST_THREADS))


@dataclass(frozen=True)
class Multiprocessors:
    """The streaming multiprocessors of a GPU: how many, and the most threads on each at
    once."""

    count: int
    threads: int


def intermediate_buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: set[int],
    value_bytes: int,
    gpu: Multiprocessors,
) -> list[int]:
    """Return the bytes of the intermediate values and of the semaphores of a reduction;
    nothing if blocks work alone.

    Args:
        dims: Dimensions that are reduced.
        value_bytes: Bytes of an intermediate value.
    """
    reduced, kept = _iteration(shape, strides, dims)
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
    shape: Sequence[int], strides: Sequence[int], dims: set[int]
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the reduced and the kept dimensions as TensorIterator orders and joins
    them: size, strides in and out."""
    out_strides, step = {}, 1
    for dim in reversed(range(len(shape))):
        if dim not in dims:
            out_strides[dim] = step
            step *= shape[dim]
    sized = [dim for dim in range(len(shape)) if shape[dim] != 1]
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
