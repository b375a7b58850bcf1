"""Bytes in use, as the job's own process counts them."""

from __future__ import annotations

import ctypes
import math
import os
import time
from typing import Any

from .spool import HOST, POOLS

HEAP = POOLS.index("heap")
RESERVED = POOLS.index("reserved")
ALLOCATED = POOLS.index("allocated")
PINNED = POOLS.index("pinned")

# A reading: (pool, device or HOST, bytes).
Reading = tuple[int, int, int]

# Memory readings at the ends of phases may take one part in this number of the time,
# and so may readings at their starts.
_END_SHARE, _START_SHARE = 200, 2000


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (field, ctypes.c_size_t)
        for field in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
            "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _find_mallinfo2() -> Any:
    """Return glibc's function that reads what malloc has handed out.

    Return None for another malloc.
    """
    if any(
        other in os.environ.get("LD_PRELOAD", "")
        for other in ("jemalloc", "tcmalloc", "mimalloc")
    ):
        return None
    try:
        # PyDLL: the call takes about 3 us, less than releasing the GIL and acquiring it
        # again.
        mallinfo2 = ctypes.PyDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallInfo2
    mallinfo2.argtypes = []
    return mallinfo2


class MemoryReader:
    """Reads the memory pools of the job's device: the GPU, or the CPU's heap."""

    def __init__(self, torch: Any, enabled: bool = True) -> None:
        self.enabled = enabled
        self._cuda = torch.cuda
        self._bindings = torch._C
        self._host_stats = getattr(torch._C, "_cuda_hostMemoryStats", None)
        self._mallinfo2 = _find_mallinfo2()
        self._device: int | None = None
        # Time of the last reading.
        self.read_ns = 0
        # Duration of a reading: the least one of late, since a single one may contain
        # the time of other processes. A heap of many fragments makes mallinfo2 slow; a
        # caller that reads on a timer chooses its interval by this.
        self.cost_ns = 0

    def read_here(self) -> list[Reading]:
        """Read every pool now.

        The device is the current thread's device, which `read` then uses by default.
        """
        if self._cuda.is_initialized():
            self._device = self._cuda.current_device()
        return self.read()

    def read(self, device: int | None = None) -> list[Reading]:
        """Read every pool of a CUDA device; return an empty list if none can be read.

        CUDA's current device belongs to a thread and is 0 in a new one: None is the
        device of the last `read_here`.
        """
        begun_ns = time.monotonic_ns()
        if self._cuda.is_initialized():
            if self._device is None:
                self._device = self._cuda.current_device()
            readings = self._read_cuda(self._device if device is None else device)
        else:
            info = self._mallinfo2() if self._mallinfo2 is not None else None
            readings = (
                [] if info is None else [(HEAP, HOST, info.uordblks + info.hblkhd)]
            )
        spent_ns = time.monotonic_ns() - begun_ns
        self.cost_ns = min(spent_ns, 2 * self.cost_ns or spent_ns)
        self.read_ns = begun_ns
        return readings

    def _read_cuda(self, device: int) -> list[Reading]:
        """Read a device's caching allocator, and pinned memory if torch counts it."""
        try:
            stats = self._bindings._cuda_memoryStats(device)
        except RuntimeError:
            # A pluggable allocator keeps none.
            return []
        readings = [
            (ALLOCATED, device, stats["allocated_bytes"]["all"]["current"]),
            (RESERVED, device, stats["reserved_bytes"]["all"]["current"]),
        ]
        pinned = (
            self._host_stats().get("allocated_bytes", {})
            if self._host_stats is not None
            else {}
        )
        if "current" in pinned:
            readings.append((PINNED, HOST, pinned["current"]))
        return readings


class PhaseReadings:
    """Reads memory at the boundaries of phases, while that takes little of the time.

    Of steps that are too short for that, which begin at a forward after another phase,
    it reads only some, each as a whole. The start of a phase is read from `due_ns` on:
    the reading at the end of the last one mostly still holds.
    """

    def __init__(self, memory: MemoryReader) -> None:
        self._memory = memory
        self._count = self._step_ns = 0
        self.at_ends = memory.enabled
        self.due_ns: float = 0 if memory.enabled else math.inf

    def begin_step(self, now_ns: int) -> None:
        """Decide whether a step is read, by the time since the last one that was."""
        due_ns = self._step_ns + self._count * self._memory.cost_ns * _END_SHARE
        self.at_ends = self._memory.enabled and now_ns >= due_ns
        if self.at_ends:
            self._count, self._step_ns = 0, now_ns

    def read(self, now_ns: int) -> list[Reading]:
        """Return the readings at a boundary."""
        readings = self._memory.read_here()
        self._count += 1
        self.due_ns = now_ns + self._memory.cost_ns * _START_SHARE
        return readings
