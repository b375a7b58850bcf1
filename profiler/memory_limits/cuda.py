"""Records the bytes of tensors in the memory of a GPU, with the history of torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ebbtide.profiler.memory_limits.held_blocks import MemoryEvent, Peak, replay

_MAX_ENTRIES = 1_000_000


class CudaPeak:
    """Records the peak of torch's allocator on a device, and its history, unless the code records one itself."""

    def __init__(self, index: int) -> None:
        self.device = f"cuda:{index}"
        self._index = index
        self._records_history = False

    def start(self) -> None:
        """Begin to record. Resets the peak of torch's statistics."""
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(self._index)
        if not torch._C._cuda_isHistoryEnabled():
            self._records_history = True
            torch.cuda.memory._record_memory_history(
                enabled="all", context="all", stacks="python", max_entries=_MAX_ENTRIES
            )

    def stop(self, limit_bytes: int) -> Peak:
        """End, and return the peak. A snapshot takes long: the holders are listed only above the limit."""
        peak_bytes = torch.cuda.max_memory_allocated(self._index)
        holders: tuple[tuple[str, int], ...] = ()
        if self._records_history:
            if peak_bytes > limit_bytes:
                holders = replay(snapshot_blocks(torch.cuda.memory._snapshot(), self._index)).holders
            torch.cuda.memory._record_memory_history(enabled=None)
        return Peak(peak_bytes, holders)


def snapshot_blocks(snapshot: Any, index: int) -> Iterator[MemoryEvent]:
    """Yield the allocations and releases on a device in a memory snapshot: first those before its history."""
    trace = [event for event in snapshot["device_traces"][index] if event["action"] in ("alloc", "free_requested")]
    allocated: set[int] = set()
    for event in trace:
        if event["action"] == "alloc":
            allocated.add(event["addr"])
        elif event["addr"] not in allocated:
            allocated.add(event["addr"])
            yield MemoryEvent(event["addr"], event["size"])
    for segment in snapshot["segments"]:
        if segment["device"] == index:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and address not in allocated:
                    yield MemoryEvent(address, block.get("requested_size", block["size"]))
                address += block["size"]
    for event in trace:
        is_allocation = event["action"] == "alloc"
        yield MemoryEvent(event["addr"], event["size"] if is_allocation else -1, _call_site(event.get("frames") or []))


def _call_site(frames: list[Any]) -> str:
    """Return the innermost frame outside of torch; the frames begin with the innermost one."""
    for frame in frames:
        if "/torch/" not in frame["filename"] and not frame["filename"].startswith("<"):
            return f"{frame['name']} ({frame['filename']}:{frame['line']})"
    return "outside of Python code"
