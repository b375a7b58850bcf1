"""Memory of the faked device: when each storage was allocated and released, and by
whom."""

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType

from ebbtide.features.dryrun.memory.allocator_pools import (
    EXPANDABLE_BYTES,
    AllocatorBlock,
    AllocatorSettings,
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
        device: The number of its device.
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
    device: int = 0


class DeviceUse:
    """The bytes in use on one device.

    Attributes:
        requested_bytes: Now, of tensors.
        peak_bytes, peak_allocated_bytes, peak_reserved_bytes: The largest so far, or
            since the job reset them.
        most_bytes, most_reserved_bytes: The largest so far, requested and reserved.
        timeline: (time in ns, requested, allocated, reserved bytes) after each
            change.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.requested_bytes = self.peak_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.most_bytes = self.most_reserved_bytes = 0
        self.timeline: list[tuple[int, int, int, int]] = []

    def reset_peaks(self) -> None:
        """Set the peaks to what is in use now."""
        self.peak_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocator.allocated_bytes
        self.peak_reserved_bytes = self.allocator.reserved_bytes

    def note_change(self, t_ns: int) -> None:
        """Account for a change at a time."""
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


class DeviceMemory:
    """Follows the storages on the devices of a process; each has a number of its own,
    its key. What is made is made on the current device of the clock.

    Attributes:
        error: The class of the error that is raised where no memory is left.
        failures: How often it was raised.
        uses: What is in use on each device, by its number.
        blocks, convolutions: Every block so far, in the order of allocation, and
            workspaces of convolutions.
    """

    def __init__(
        self,
        clock: VirtualClock,
        new_allocator: Callable[[], CachingAllocator] = CachingAllocator,
    ) -> None:
        self.blocks: list[DeviceBlock] = []
        self.convolutions: list[DeviceBlock] = []
        self.uses: dict[int, DeviceUse] = {}
        self.error: type[Exception] = MemoryError
        self.failures = 0
        self._clock, self._new_allocator = clock, new_allocator
        self._settings: AllocatorSettings | None = None
        self._live: dict[int, DeviceBlock] = {}
        self._allocated: dict[DeviceBlock, AllocatorBlock] = {}

    @property
    def device(self) -> int:
        """The number of the current device."""
        return self._clock.device

    def use(self, device: int | None = None) -> DeviceUse:
        """Return what is in use on a device; None: the current one."""
        number = self._clock.device if device is None else device
        if number not in self.uses:
            use = self.uses[number] = DeviceUse(self._new_allocator())
            use.allocator.on_shortage = self._fail_in_search
            use.allocator.settings = self._settings or use.allocator.settings
        return self.uses[number]

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator of the current device."""
        return self.use().allocator

    @property
    def requested_bytes(self) -> int:
        """The bytes of tensors on the current device."""
        return self.use().requested_bytes

    @property
    def most_bytes(self) -> int:
        """The most bytes of tensors on the current device."""
        return self.use().most_bytes

    @property
    def most_reserved_bytes(self) -> int:
        """The most bytes reserved on the current device."""
        return self.use().most_reserved_bytes

    @property
    def timeline(self) -> list[tuple[int, int, int, int]]:
        """The memory in use on the current device over time."""
        return self.use().timeline

    def by_size(self) -> list[int]:
        """Return the devices on which something was allocated, the fullest first; the
        current one if there is none."""
        used = [number for number, use in self.uses.items() if use.timeline]
        used.sort(key=lambda number: (-self.uses[number].most_reserved_bytes, number))
        return used or [self.device]

    def set_settings(self, settings: AllocatorSettings) -> None:
        """Set the settings of the allocators of all devices."""
        self._settings = settings
        for use in self.uses.values():
            use.allocator.settings = settings

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
        with self._clock.on(before.device):
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
        for use in () if self._clock.closed else self.uses.values():
            use.allocator.empty_cache()
            use.note_change(self._clock.tick())

    def _allocate(self, block: DeviceBlock, size: int) -> None:
        if size > EXPANDABLE_BYTES:
            raise self.error(
                f"CUDA out of memory. Tried to allocate {size / 1e9:,.0f} GB (dry run)"
            )
        block.size = size
        block.start_ns, block.stream = self._clock.tick(), self._clock.stream
        block.device = self.device
        if not size:
            return
        use = self.use()
        allocated = use.allocator.allocate(
            size, block.stream, block.start_ns, always=block.most is None
        )
        if allocated is not None:
            self._allocated[block] = allocated
            use.requested_bytes += size
            self.blocks.append(block)
            use.note_change(block.start_ns)

    def _free(self, block: DeviceBlock) -> None:
        allocated = self._allocated.pop(block, None)
        if allocated is not None:
            use = self.use(block.device)
            block.end_ns = self._clock.tick()
            reached = [self._clock.record(stream)[TYPICAL] for stream in block.streams]
            use.allocator.free(allocated, max(reached, default=None))
            use.requested_bytes -= block.size
            use.note_change(block.end_ns)

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
