"""Memory that kernels of CUDA take from the caching allocator beside the tensors of the job."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from ebbtide.profiler.dryrun.call_stacks import CallStacks
from ebbtide.profiler.dryrun.device_memory import DeviceMemory
from ebbtide.profiler.dryrun.index_buffers import INDEX_WRITES, index_buffers
from ebbtide.profiler.dryrun.reduction_buffers import REDUCTIONS, Multiprocessors, reduction_buffers

_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset(
    {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten._scaled_mm}
)
# parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp; the larger one on Hopper and Blackwell.
_LARGE_BYTES = 4096 * 8 * 1024
_SMALL_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_CAPABILITIES = (9, 10, 12)
_PARTS = re.compile(r":(\d+):(\d+)")
# Multiprocessors of a GPU by the beginning of its name, from its data sheet; those of an H100 SXM for others.
_MULTIPROCESSORS = {
    "a100": 108,
    "a10": 72,
    "rtx3090": 82,
    "rtx4090": 128,
    "rtx5090": 170,
    "l40s": 142,
    "h100-80gb-pcie": 114,
    "b200": 148,
    "v100": 80,
    "mi300x": 304,
}
_H100_MULTIPROCESSORS = 132
# Most threads on a multiprocessor by compute capability, from the CUDA C++ Programming Guide.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_MOST_THREADS = 2048


def kernel_workspaces(
    memory: DeviceMemory, stacks: CallStacks, device_name: str, capability: tuple[int, int]
) -> KernelWorkspaces:
    """Return the workspaces of a GPU."""
    return KernelWorkspaces(memory, stacks, workspace_bytes(capability), multiprocessors(device_name, capability))


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of a workspace of cuBLAS on a device of a compute capability.

    `CUBLAS_WORKSPACE_CONFIG` sets another size. cuBLASLt uses the same workspace (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`).
    """
    parts = _PARTS.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if parts:
        return sum(1024 * int(size) * int(count) for size, count in parts)
    return _LARGE_BYTES if capability[0] in _LARGE_CAPABILITIES else _SMALL_BYTES


def multiprocessors(device_name: str, capability: tuple[int, int]) -> Multiprocessors:
    """Return the multiprocessors of a GPU."""
    name = device_name.lower()
    counts = (count for prefix, count in _MULTIPROCESSORS.items() if name.startswith(prefix))
    return Multiprocessors(next(counts, _H100_MULTIPROCESSORS), _THREADS.get(capability, _MOST_THREADS))


class KernelWorkspaces:
    """Accounts for the memory that kernels take.

    cuBLAS takes a workspace at the first matrix product of each thread, the job's own and that of autograd, and keeps
    it. Reductions, and writes at indices, take buffers while they run.

    Args:
        memory: The memory of the device.
        stacks: The call stacks.
        size: Bytes of a workspace of cuBLAS.
        gpu: The multiprocessors of the device.
    """

    def __init__(self, memory: DeviceMemory, stacks: CallStacks, size: int, gpu: Multiprocessors) -> None:
        self._memory, self._stacks, self._size, self._gpu = memory, stacks, size, gpu
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
        if kind in REDUCTIONS:
            buffers = reduction_buffers(func, args, kwargs, result, self._gpu)
        elif kind in INDEX_WRITES:
            buffers = index_buffers(kind, args)
        else:
            return
        if buffers:
            self._memory.add_temporaries(buffers, self._stacks.current())
