"""Memory of the faked device: when each storage was allocated and released, and by whom."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.dryrun.allocator_pools import AllocatorBlock
from ebbtide.profiler.dryrun.caching_allocator import CachingAllocator
from ebbtide.profiler.dryrun.clock import VirtualClock
from ebbtide.profiler.dryrun.time_priors import TYPICAL


@dataclass(eq=False, slots=True)
class DeviceBlock:
    """Memory that a storage held for a time.

    Attributes:
        start_ns: When it was allocated.
        size: Bytes, as requested.
        stack: Number of the call stack.
        module: Dotted name of the module that ran, None outside of modules.
        end_ns: When it was released; None: held to the end.
        category: `parameter`, `buffer`, `gradient`, `optimizer_state`, or `temporary` for a workspace; None: another.
        streams: Other streams that use it, as the job said by `Tensor.record_stream`.
    """

    start_ns: int
    size: int
    stack: int
    module: str | None
    end_ns: int | None = None
    category: str | None = None
    allocated: AllocatorBlock | None = None
    streams: tuple[int, ...] = ()


class DeviceMemory:
    """Follows the storages of fake tensors on the device.

    Args:
        clock: The clock, which knows the current stream.
        allocator: The simulated allocator; None: one with torch's default settings.

    Attributes:
        requested_bytes: Bytes in use, as tensors requested them.
        peak_bytes, peak_allocated_bytes, peak_reserved_bytes: The largest so far, or since the job reset them.
        most_bytes, most_reserved_bytes: The largest so far, requested and reserved.
        blocks: Every block so far, in the order of allocation.
        timeline: (time in ns, requested, allocated, reserved bytes) after each change.
        allocator: The simulated allocator.
    """

    def __init__(self, clock: VirtualClock, allocator: CachingAllocator | None = None) -> None:
        self.requested_bytes = self.peak_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.blocks: list[DeviceBlock] = []
        self.timeline: list[tuple[int, int, int, int]] = []
        self.allocator = allocator or CachingAllocator()
        self.most_bytes = self.most_reserved_bytes = 0
        self._clock = clock
        # Address of a storage -> (its block, the reference whose callback releases it)
        self._live: dict[int, tuple[DeviceBlock, Any]] = {}
        self._closed = False

    def has(self, storage: Any) -> bool:
        """Return whether a storage is followed."""
        return storage._cdata in self._live

    def add(self, storage: Any, stack: int, module: str | None) -> None:
        """Follow a new storage until it is released."""
        key = storage._cdata
        if self._closed:
            return
        reference = weakref.ref(storage, lambda _reference: self._release(key))
        block = DeviceBlock(0, 0, stack, module)
        self._live[key] = block, reference
        self._allocate(block, storage.nbytes())

    def add_workspace(self, size: int, stack: int) -> None:
        """Add memory that a library takes and keeps."""
        if not self._closed:
            self._allocate(DeviceBlock(0, 0, stack, None, category="temporary"), size)

    def add_temporaries(self, sizes: list[int], stack: int) -> None:
        """Add memory that a kernel takes while it runs."""
        if not self._closed:
            blocks = [DeviceBlock(0, 0, stack, None, category="temporary") for _ in sizes]
            for block, size in zip(blocks, sizes, strict=True):
                self._allocate(block, size)
            for block in blocks:
                self._free(block)

    def take_over(self, old: Any, new: Any) -> bool:
        """Let a new storage have the memory of an old one, and return whether that is followed and as large.

        An operation in place looks like this, where fake tensors run it out of place.
        """
        entry = self._live.get(old._cdata)
        if entry is None or self._closed or entry[0].size != new.nbytes() or self.has(new):
            return False
        del self._live[old._cdata]
        key = new._cdata
        self._live[key] = entry[0], weakref.ref(new, lambda _reference: self._release(key))
        return True

    def resize(self, storage: Any, stack: int, module: str | None) -> None:
        """Account for a storage that has changed its size, as FSDP2 does to free and to allocate parameters."""
        entry = self._live.get(storage._cdata)
        if entry is None or self._closed or entry[0].size == storage.nbytes():
            return
        before, reference = entry
        self._free(before)
        block = DeviceBlock(0, 0, stack, module, category=before.category)
        self._live[storage._cdata] = block, reference
        self._allocate(block, storage.nbytes())

    def record_stream(self, storage: Any, stream: int) -> None:
        """Note that a stream uses a storage: when it is released, its memory waits for that stream."""
        entry = self._live.get(storage._cdata)
        if entry is not None and stream not in entry[0].streams:
            entry[0].streams += (stream,)

    def set_categories(self, holders: list[tuple[int, int, str, str | None]]) -> None:
        """Set category and module of storages. holders: (address of the storage, bytes, category, module)."""
        for key, _, category, module in holders:
            if key in self._live:
                block = self._live[key][0]
                block.category, block.module = category, module

    def empty_cache(self) -> None:
        """Release the cached segments, as `torch.cuda.empty_cache()` does."""
        if not self._closed:
            self.allocator.empty_cache()
            self._note_change(self._clock.tick())

    def reset_peaks(self) -> None:
        """Set the peaks to what is in use now."""
        self.peak_bytes, self.peak_allocated_bytes = self.requested_bytes, self.allocator.allocated_bytes
        self.peak_reserved_bytes = self.allocator.reserved_bytes

    def summary(self, capacity_bytes: int | None) -> str:
        """Return the peaks in words."""
        text = f"peak: {self.most_bytes / 1e9:,.2f} GB of tensors, {self.most_reserved_bytes / 1e9:,.2f} GB reserved"
        return text if capacity_bytes is None else f"{text}, of {capacity_bytes / 1e9:,.2f} GB"

    def close(self) -> None:
        """Follow nothing any more: what happens from now on is the end of the job."""
        self._closed = True

    def _release(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None and not self._closed:
            self._free(entry[0])

    def _allocate(self, block: DeviceBlock, size: int) -> None:
        block.size = size
        block.start_ns = self._clock.tick()
        if size:
            block.allocated = self.allocator.allocate(size, self._clock.stream, block.start_ns)
            self.requested_bytes += size
            self.blocks.append(block)
            self._note_change(block.start_ns)

    def _free(self, block: DeviceBlock) -> None:
        if block.allocated is not None:
            block.end_ns = self._clock.tick()
            reached = [self._clock.record(stream)[TYPICAL] for stream in block.streams]
            self.allocator.free(block.allocated, max(reached, default=None))
            block.allocated = None
            self.requested_bytes -= block.size
            self._note_change(block.end_ns)

    def _note_change(self, t_ns: int) -> None:
        allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
        self.peak_bytes = max(self.peak_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        self.most_bytes = max(self.most_bytes, self.requested_bytes)
        self.most_reserved_bytes = max(self.most_reserved_bytes, reserved)
        self.timeline.append((t_ns, self.requested_bytes, allocated, reserved))
