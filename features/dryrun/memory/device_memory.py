"""Memory of the faked device: when each storage was allocated and released, and by
whom."""

import dis
import sys
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType

from ebbtide.features.dryrun.memory.allocator_pools import (
    EXPANDABLE_BYTES,
    AllocatorBlock,
)
from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.machines.kernels.time_priors import TYPICAL

# Names in functions that try batch sizes until memory is short: accelerate trains
# there, Lightning only tries.
_SEARCH, _TRIALS = "should_reduce_batch_size", "is_oom_error"
# How often a job is told that memory is short.
_MOST_FAILURES = 64


@dataclass(eq=False, slots=True)
class DeviceBlock:
    """Memory that a storage held for a time.

    Attributes:
        module: Dotted name of the module that ran, None outside of modules.
        end_ns: When it was released; None: held to the end.
        category: `parameter`, `buffer`, `gradient`, `optimizer_state`, or `temporary`
            for a workspace; None: another.
        stream, streams: That which allocated it, and others that use it, as the job
            said by `Tensor.record_stream`.
        most: Of a convolution's workspace, which the job can go on without, the most
            bytes that it may take; else None.
    """

    start_ns: int
    size: int
    stack: int
    module: str | None
    end_ns: int | None = None
    category: str | None = None
    stream: int = 0
    streams: tuple[int, ...] = ()
    most: int | None = None


class DeviceMemory:
    """Follows the storages on the device; each has a number of its own, its key.

    Attributes:
        error: The class of the error that is raised where no memory is left.
        failures: How often it was raised.
        peak_bytes, peak_allocated_bytes, peak_reserved_bytes: The largest so far, or
            since the job reset them.
        most_bytes, most_reserved_bytes: The largest so far, requested and reserved.
        blocks, convolutions: Every block so far, in the order of allocation, and
            workspaces of convolutions.
        timeline: (time in ns, requested, allocated, reserved bytes) after each
            change.
    """

    def __init__(
        self, clock: VirtualClock, allocator: CachingAllocator | None = None
    ) -> None:
        self.requested_bytes = self.peak_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.blocks: list[DeviceBlock] = []
        self.timeline: list[tuple[int, int, int, int]] = []
        self.convolutions: list[DeviceBlock] = []
        self.allocator = allocator or CachingAllocator()
        self.allocator.on_shortage = self._fail_in_search
        self.error: type[Exception] = MemoryError
        self.failures = 0
        self.most_bytes = self.most_reserved_bytes = 0
        self._clock = clock
        self._live: dict[int, DeviceBlock] = {}
        self._allocated: dict[DeviceBlock, AllocatorBlock] = {}

    def has(self, key: int) -> bool:
        return key in self._live

    def add(self, key: int, size: int, stack: int, module: str | None) -> None:
        """Follow a new storage until it is released."""
        if self._clock.closed:
            return
        block = self._live[key] = DeviceBlock(0, 0, stack, module)
        self._allocate(block, size)

    def free(self, key: int) -> None:
        """Release a storage."""
        block = self._live.pop(key, None)
        if block is not None and not self._clock.closed:
            self._free(block)

    def add_workspace(self, size: int, stack: int) -> None:
        """Add memory that a library takes and keeps."""
        if not self._clock.closed:
            self._allocate(DeviceBlock(0, 0, stack, None, category="temporary"), size)

    def add_temporaries(self, sizes: list[int], stack: int) -> None:
        """Add memory that a kernel takes while it runs."""
        if not self._clock.closed:
            blocks = [
                DeviceBlock(0, 0, stack, None, category="temporary") for _ in sizes
            ]
            try:
                for block, size in zip(blocks, sizes, strict=True):
                    self._allocate(block, size)
            finally:
                for block in blocks:
                    self._free(block)

    def add_convolution(self, sizes: list[tuple[int, int]], stack: int) -> None:
        """Add the workspaces of a convolution, (typical, most) bytes, one after the
        other, as far as they are free."""
        for typical, most in [] if self._clock.closed else sizes:
            block = DeviceBlock(0, 0, stack, None, category="temporary", most=most)
            self.convolutions.append(block)
            self._allocate(block, typical)
            self._free(block)

    def take_over(self, old: int, new: int, size: int) -> bool:
        """Let a new storage have the memory of an old one, and return whether that is
        followed and as large.

        An operation in place looks like this, where fake tensors run it out of
        place."""
        block = self._live.get(old)
        if (
            block is None
            or self._clock.closed
            or block.size != size
            or new in self._live
        ):
            return False
        self._live[new] = self._live.pop(old)
        return True

    def resize(self, key: int, size: int, stack: int, module: str | None) -> None:
        """Account for a storage that has changed its size, as FSDP2 does to free and to
        allocate parameters."""
        before = self._live.get(key)
        if before is None or self._clock.closed or before.size == size:
            return
        self._free(before)
        block = DeviceBlock(0, 0, stack, module, category=before.category)
        self._live[key] = block
        self._allocate(block, size)

    def record_stream(self, key: int, stream: int) -> None:
        """Note that a stream uses a storage: when it is released, its memory waits for
        that stream."""
        block = self._live.get(key)
        if block is not None and stream not in block.streams:
            block.streams += (stream,)

    def set_categories(self, holders: list[tuple[int, int, str, str | None]]) -> None:
        """Set category and module of storages. holders: (key, bytes, category,
        module)."""
        for key, _, category, module in holders:
            if key in self._live:
                block = self._live[key]
                block.category, block.module = category, module

    def empty_cache(self) -> None:
        """Release the cached segments, as `torch.cuda.empty_cache()` does."""
        if not self._clock.closed:
            self.allocator.empty_cache()
            self._note_change(self._clock.tick())

    def reset_peaks(self) -> None:
        """Set the peaks to what is in use now."""
        self.peak_bytes, self.peak_allocated_bytes = (
            self.requested_bytes,
            self.allocator.allocated_bytes,
        )
        self.peak_reserved_bytes = self.allocator.reserved_bytes

    def _allocate(self, block: DeviceBlock, size: int) -> None:
        if size > EXPANDABLE_BYTES:
            raise self.error(
                f"CUDA out of memory. Tried to allocate {size / 1e9:,.0f} GB (dry run)"
            )
        block.size = size
        block.start_ns, block.stream = self._clock.tick(), self._clock.stream
        if not size:
            return
        allocated = self.allocator.allocate(
            size, block.stream, block.start_ns, always=block.most is None
        )
        if allocated is not None:
            self._allocated[block] = allocated
            self.requested_bytes += size
            self.blocks.append(block)
            self._note_change(block.start_ns)

    def _free(self, block: DeviceBlock) -> None:
        allocated = self._allocated.pop(block, None)
        if allocated is not None:
            block.end_ns = self._clock.tick()
            reached = [self._clock.record(stream)[TYPICAL] for stream in block.streams]
            self.allocator.free(allocated, max(reached, default=None))
            self.requested_bytes -= block.size
            self._note_change(block.end_ns)

    def _note_change(self, t_ns: int) -> None:
        allocated, reserved = (
            self.allocator.allocated_bytes,
            self.allocator.reserved_bytes,
        )
        self.peak_bytes = max(self.peak_bytes, self.requested_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        self.most_bytes = max(self.most_bytes, self.requested_bytes)
        self.most_reserved_bytes = max(self.most_reserved_bytes, reserved)
        self.timeline.append((t_ns, self.requested_bytes, allocated, reserved))

    def _fail_in_search(self, size: int) -> None:
        """Raise the error of a device that has no memory left where the job is made for
        it; other jobs go on, and so does one that it has not helped often."""
        if self.failures < _MOST_FAILURES and (is_trial(_SEARCH) or _tries_again()):
            self.failures += 1
            raise self.error(
                f"CUDA out of memory. Tried to allocate {size / 2**20:,.2f} MiB (dry "
                "run)"
            )


def _tries_again() -> bool:
    """Return whether a function that is running catches a shortage of memory, and it or
    its caller is in a loop: other handlers end the job."""
    frame: FrameType | None = sys._getframe(1)
    caught_below = False
    while frame is not None:
        catches, has_loop = _around(frame.f_code, frame.f_lasti)
        if has_loop and (catches or caught_below):
            return True
        caught_below, frame = catches, frame.f_back
    return False


@cache
def _around(code: CodeType, position: int) -> tuple[bool, bool]:
    """Return whether an instruction is inside of a handler of a shortage, and before
    the end of a loop."""
    texts = (text for text in code.co_consts if isinstance(text, str))
    names_shortage = "OutOfMemoryError" in code.co_names or any(
        "out of memory" in text for text in texts
    )
    # The first test of a `while` is before its loop.
    has_loop = any(
        "BACKWARD" in each.opname and each.offset > position
        for each in dis.get_instructions(code)
    )
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    has_handler = any(each.start <= position < each.end for each in entries)
    return names_shortage and has_handler, has_loop


def is_trial(*names: str) -> bool:
    """Return whether a function that is running uses one of these names, or the name of
    a trial."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not {_TRIALS, *names} & set(frame.f_code.co_names):
        frame = frame.f_back
    return frame is not None
