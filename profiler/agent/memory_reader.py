"""Bytes in use, as the job's own process counts them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any, Callable

from .spool import HOST, POOLS

HEAP = POOLS.index("heap")
RESERVED = POOLS.index("reserved")
ALLOCATED = POOLS.index("allocated")
REQUESTED = POOLS.index("requested")
PINNED = POOLS.index("pinned")

# A reading: (pool, device or HOST, bytes).
Reading = tuple[int, int, int]
Reader = Callable[[], Iterator[Reading]]


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (field, ctypes.c_size_t)
        for field in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def heap_reader() -> Reader | None:
    """Bytes that malloc has handed out, from glibc's `mallinfo2`; None where the job uses another malloc."""
    if any(other in os.environ.get("LD_PRELOAD", "") for other in ("jemalloc", "tcmalloc", "mimalloc")):
        return None
    try:
        # PyDLL: the call takes about 3 us, less than handing the GIL over and fighting for it again.
        mallinfo2 = ctypes.PyDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo2
    mallinfo2.argtypes = []

    def read() -> Iterator[Reading]:
        info = mallinfo2()
        yield HEAP, HOST, info.uordblks + info.hblkhd

    return read


def cuda_reader(torch: Any) -> Reader:
    """torch's caching allocator on the current device, and its pinned host memory where torch counts it."""
    host_stats = getattr(torch._C, "_cuda_hostMemoryStats", None)

    def read() -> Iterator[Reading]:
        device = torch.cuda.current_device()
        stats = torch._C._cuda_memoryStats(device)
        yield ALLOCATED, device, stats["allocated_bytes"]["all"]["current"]
        yield RESERVED, device, stats["reserved_bytes"]["all"]["current"]
        if host_stats is not None:
            pinned = host_stats().get("allocated_bytes", {})
            if "current" in pinned:
                yield PINNED, HOST, pinned["current"]

    return read


class MemoryLine:
    """Reads the pools of whichever device the job uses.

    `cost_ns` is what the last reading took: a heap of many fragments makes mallinfo2 slow, and who reads on a
    timer goes by it.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._read_cuda = cuda_reader(torch)
        self._read_heap = heap_reader()
        self.cost_ns = 0

    def read(self) -> list[Reading]:
        """The readings of this moment; none where nothing can be read."""
        reader = self._read_cuda if self._cuda.is_initialized() else self._read_heap
        if reader is None:
            return []
        began = time.thread_time_ns()
        readings = list(reader())
        self.cost_ns = time.thread_time_ns() - began
        return readings
