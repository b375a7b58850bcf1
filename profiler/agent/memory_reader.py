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
ReadFunction = Callable[[], Iterator[Reading]]


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (field, ctypes.c_size_t)
        for field in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def heap_reader() -> ReadFunction | None:
    """Return a function that reads the bytes malloc has handed out, from glibc's `mallinfo2`.

    Returns:
        The function; None if the job uses another malloc.
    """
    if any(other in os.environ.get("LD_PRELOAD", "") for other in ("jemalloc", "tcmalloc", "mimalloc")):
        return None
    try:
        # PyDLL: the call takes about 3 us, less than releasing the GIL and acquiring it again.
        mallinfo2 = ctypes.PyDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo2
    mallinfo2.argtypes = []

    def read() -> Iterator[Reading]:
        info = mallinfo2()
        yield HEAP, HOST, info.uordblks + info.hblkhd

    return read


def cuda_reader(torch: Any) -> ReadFunction:
    """Return a function that reads torch's caching allocator on the current device.

    It also reads torch's pinned host memory, where this version of torch counts it.
    """
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


class MemoryReader:
    """Reads the memory pools of the device that the job uses: the GPU, or the CPU's heap.

    Attributes:
        cost_ns: CPU time of the last reading. A heap of many fragments makes mallinfo2 slow; a caller that reads on a
            timer chooses its interval by this.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._read_cuda = cuda_reader(torch)
        self._read_heap = heap_reader()
        self.cost_ns = 0

    def read(self) -> list[Reading]:
        """Read every pool now; return an empty list if none can be read."""
        reader = self._read_cuda if self._cuda.is_initialized() else self._read_heap
        if reader is None:
            return []
        start_ns = time.thread_time_ns()
        readings = list(reader())
        self.cost_ns = time.thread_time_ns() - start_ns
        return readings
