"""Workspaces of cuBLAS, which torch takes from the caching allocator."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.profiler.dryrun.device_memory import DeviceMemory

_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset(
    {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten._scaled_mm}
)
# getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp; the larger one from compute capability 9.0 on.
_LARGE_BYTES = 4096 * 8 * 1024
_SMALL_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of a workspace on a device of a compute capability."""
    return _LARGE_BYTES if capability[0] in (9, 10) else _SMALL_BYTES


class CublasWorkspaces:
    """Takes a workspace at the first matrix product of each thread: the job's own, and that of autograd.

    Args:
        memory: The memory of the device.
        size: Bytes of a workspace.
    """

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._memory, self._size = memory, size
        self._threads: set[bool] = set()

    def note(self, func: Any, stack: int) -> None:
        """Account for an operation that was called from a stack."""
        if func._overloadpacket in _MATRIX_PRODUCTS:
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward not in self._threads:
                self._threads.add(in_backward)
                self._memory.add_workspace(self._size, stack)
