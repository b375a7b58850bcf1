"""Memory of the faked device: when each storage was allocated and released, and by
whom."""

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ebbtide.features.dryrun.memory.allocator_pools import (
    EXPANDABLE_BYTES,
    AllocatorBlock,
)
from ebbtide.features.dryrun.memory.caching_allocator import CachingAllocator
from ebbtide.features.dryrun.time.clock import VirtualClock
from ebbtide.machines.kernels.time_priors import TYPICAL
from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ENGINE

_MAX_FRAMES = 40
# Names in functions that try batch sizes until memory is short: accelerate trains
# there, Lightning only tries.
_SEARCH, _TRIALS = "should_reduce_batch_size", "is_oom_error"


class CallStacks:
    """The different call stacks so far.

    `torch`: the module `torch`; what it does inside an operation is left out.

    `texts`: each stack, from the outermost frame to the innermost one, a line per
    frame; what autograd runs without Python frames has the node of the graph instead,
    as in recordings."""

    def __init__(self, torch: Any) -> None:
        self.texts: list[str] = []
        # The name of autograd's node, and instruction and line of each frame -> number.
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._numbers_of_texts: dict[str, int] = {}
        root = str(Path(torch.__file__).parent)
        folders = (Path(__file__).parents[3], Path(__file__).resolve().parents[3])
        own = (
            str(folder / name)
            for folder in folders
            for name in ("profiler", "features")
        )
        self._left_out = (
            *own,
            f"{root}/utils/_",
            f"{root}/_subclasses",
            f"{root}/_ops.py",
            f"{root}/nn/modules/module.py",
            f"{root}/_compile.py",
            f"{root}/_dynamo",
            "<frozen runpy>",
        )

    def current(self) -> int:
        """Return the number of the stack of the caller."""
        node: Any = (
            torch._C._current_autograd_node()
            if torch._C._current_graph_task_id() != -1
            else None
        )
        frame: FrameType | None = sys._getframe(1)
        parts: list[Any] = [node and node.name()]
        # Each read of `f_code` calls the hook of `FileGuard`, which takes ten times as
        # long as this loop.
        while frame is not None and len(parts) < 2 * _MAX_FRAMES:
            parts += frame.f_lasti, frame.f_lineno
            frame = frame.f_back
        key = tuple(parts)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._number_of(
                self._text(sys._getframe(1), node)
            )
        return number

    def _number_of(self, text: str) -> int:
        number = self._numbers_of_texts.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def _text(self, frame: FrameType | None, node: Any) -> str:
        lines: list[str] = []
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if not code.co_filename.startswith(self._left_out):
                lines.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
            frame = frame.f_back
        from_engine = (
            node is not None
            and lines[:1]
            and lines[0].startswith("_engine_run_backward ")
        )
        return f"{ENGINE}\n{node.name()}" if from_engine else "\n".join(reversed(lines))


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
    allocated: AllocatorBlock | None = None
    stream: int = 0
    streams: tuple[int, ...] = ()
    most: int | None = None


class DeviceMemory:
    """Follows the storages of fake tensors on the device.

    Attributes:
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
        self.allocator.on_shortage = _fail_in_search
        self.most_bytes = self.most_reserved_bytes = 0
        self._clock = clock
        # Address of a storage -> (its block, the reference whose callback releases it)
        self._live: dict[int, tuple[DeviceBlock, Any]] = {}

    def has(self, storage: Any) -> bool:
        return storage._cdata in self._live

    def add(self, storage: Any, stack: int, module: str | None) -> None:
        """Follow a new storage until it is released."""
        key = storage._cdata
        if self._clock.closed:
            return
        reference = weakref.ref(storage, lambda _reference: self._release(key))
        block = DeviceBlock(0, 0, stack, module)
        self._live[key] = block, reference
        self._allocate(block, storage.nbytes())

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

    def take_over(self, old: Any, new: Any) -> bool:
        """Let a new storage have the memory of an old one, and return whether that is
        followed and as large.

        An operation in place looks like this, where fake tensors run it out of
        place."""
        entry = self._live.get(old._cdata)
        if (
            entry is None
            or self._clock.closed
            or entry[0].size != new.nbytes()
            or self.has(new)
        ):
            return False
        del self._live[old._cdata]
        key = new._cdata
        self._live[key] = (
            entry[0],
            weakref.ref(new, lambda _reference: self._release(key)),
        )
        return True

    def resize(self, storage: Any, stack: int, module: str | None) -> None:
        """Account for a storage that has changed its size, as FSDP2 does to free and to
        allocate parameters."""
        entry = self._live.get(storage._cdata)
        if entry is None or self._clock.closed or entry[0].size == storage.nbytes():
            return
        before, reference = entry
        self._free(before)
        block = DeviceBlock(0, 0, stack, module, category=before.category)
        self._live[storage._cdata] = block, reference
        self._allocate(block, storage.nbytes())

    def record_stream(self, storage: Any, stream: int) -> None:
        """Note that a stream uses a storage: when it is released, its memory waits for
        that stream."""
        entry = self._live.get(storage._cdata)
        if entry is not None and stream not in entry[0].streams:
            entry[0].streams += (stream,)

    def set_categories(self, holders: list[tuple[int, int, str, str | None]]) -> None:
        """Set category and module of storages. holders: (address of the storage, bytes,
        category, module)."""
        for key, _, category, module in holders:
            if key in self._live:
                block = self._live[key][0]
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

    def _release(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None and not self._clock.closed:
            self._free(entry[0])

    def _allocate(self, block: DeviceBlock, size: int) -> None:
        if size > EXPANDABLE_BYTES:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 1e9:,.0f} GB (dry run)"
            )
        block.size = size
        block.start_ns, block.stream = self._clock.tick(), self._clock.stream
        if size:
            block.allocated = self.allocator.allocate(
                size, block.stream, block.start_ns, always=block.most is None
            )
        if block.allocated is not None:
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


def is_trial(*names: str) -> bool:
    """Return whether a function that is running uses one of these names, by default
    those of trials alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not {_TRIALS, *names} & set(frame.f_code.co_names):
        frame = frame.f_back
    return frame is not None


def _fail_in_search(size: int) -> None:
    """Raise the error of a device that has no memory left where the job is made for it;
    other jobs go on."""
    if is_trial(_SEARCH):
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / 2**20:,.2f} MiB (dry run)"
        )


class FakeHostMemory:
    """Follows the fake tensors of the host, which would be weights and optimizer state,
    and pinned memory.

    Pinned memory has the sizes of torch's allocator for it
    (`c10/core/CachingHostAllocator.h`): the next power of two, and what is released is
    kept for requests of the same size.

    Attributes:
        most_bytes, most_pinned_bytes: The largest sum of both so far, and that of
            pinned memory.
        timeline: (time in ns, pageable, pinned bytes) after each change.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.pageable_bytes = self.pinned_bytes = self.most_bytes = (
            self.most_pinned_bytes
        ) = 0
        self.timeline: list[tuple[int, int, int]] = []
        self._clock = clock
        # Address of a storage -> (its pageable bytes, its pinned block or 0, the
        # reference whose callback releases it)
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._kept: Counter[int] = Counter()

    def install(self, patches: Patches) -> None:
        """Replace the methods of tensors that pin memory, until `patches.undo()`."""

        def pin_memory(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
            self._pin(tensor.untyped_storage())
            return tensor

        def is_pinned(tensor: Any, *_args: Any, **_kwargs: Any) -> bool:
            return bool(self._live.get(tensor.untyped_storage()._cdata, (0, 0))[1])

        patches.set(torch.Tensor, "pin_memory", pin_memory)
        patches.set(torch.Tensor, "is_pinned", is_pinned)

    def follow(self, storage: Any) -> None:
        """Count the storage of a fake tensor of the host until it is released, if it is
        not yet."""
        if not self._clock.closed and storage._cdata not in self._live:
            self._add(storage, storage.nbytes(), 0)

    def notes(self) -> list[str]:
        """Return lines for people."""
        if not self.most_bytes:
            return []
        return [
            f"host memory of this rank: at most {self.most_bytes / 1e9:,.2f} GB of "
            "large tensors on the host and of "
            f"pinned memory, {self.most_pinned_bytes / 1e9:,.2f} GB of it pinned (in "
            "powers of two, as torch pins it); "
            "Python, libraries and data come on top"
        ]

    def _pin(self, storage: Any) -> None:
        size, block, _ = self._live.get(storage._cdata, (0, 0, None))
        if block or not storage.nbytes():
            return
        block = 1 << (storage.nbytes() - 1).bit_length()
        if self._kept[block]:
            self._kept[block] -= 1
        elif not self._clock.closed:
            self.pinned_bytes += block
        self.pageable_bytes -= size
        self._add(storage, 0, block)

    def _add(self, storage: Any, size: int, block: int) -> None:
        key = storage._cdata
        self._live[key] = (
            size,
            block,
            weakref.ref(storage, lambda _reference: self._release(key)),
        )
        self.pageable_bytes += size
        self._note_change()

    def _release(self, key: int) -> None:
        size, block, _ = self._live.pop(key)
        self._kept[block] += 1
        if not self._clock.closed:
            self.pageable_bytes -= size
            self._note_change()

    def _note_change(self) -> None:
        if not self._clock.closed:
            self.most_bytes = max(
                self.most_bytes, self.pageable_bytes + self.pinned_bytes
            )
            self.most_pinned_bytes = max(self.most_pinned_bytes, self.pinned_bytes)
            self.timeline.append(
                (self._clock.tick(), self.pageable_bytes, self.pinned_bytes)
            )
