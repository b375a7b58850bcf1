"""The limit of memory for a block of code, as a context manager or a decorator."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ebbtide.units import ByteCount, byte_count, bytes_text

BEFORE = "allocated before the block"


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation, or a release."""

    # Address of the block, or another object that its allocation and its release have
    # in common.
    key: Hashable
    bytes: int  # Bytes; negative for a release, which may have any negative number.
    site: str = BEFORE


@dataclass(frozen=True)
class Peak:
    """The largest memory in use, and its `holders` as (call site, bytes), the largest
    first; empty if not asked for."""

    bytes: int
    holders: tuple[tuple[str, int], ...] = ()


def replay(events: Iterable[MemoryEvent]) -> Peak:
    """Return the peak of events in order. Releases of blocks that were never allocated
    are ignored."""
    events = list(events)
    used = peak = peak_position = 0
    sizes: dict[Hashable, int] = {}
    for position, event in enumerate(events):
        used -= sizes.pop(event.key, 0)
        if event.bytes > 0:
            sizes[event.key] = event.bytes
            used += event.bytes
        if used > peak:
            peak, peak_position = used, position + 1
    live: dict[Hashable, MemoryEvent] = {}
    for event in events[:peak_position]:
        live.pop(event.key, None)
        if event.bytes > 0:
            live[event.key] = event
    by_site: Counter[str] = Counter()
    for block in live.values():
        by_site[block.site] += block.bytes
    return Peak(peak, tuple(by_site.most_common()))


class CpuPeak:
    """Records the tensors that are alive at the start, and all allocations.

    Tensors are recorded until each is released, allocations until the end.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            with_stack=True,
        )
        # Storage -> its bytes, and how many tensors use it.
        self._sizes: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._references: list[Any] = []
        self._released: list[tuple[int, int]] = []

    def start(self) -> None:
        """Begin to record."""
        for tensor in _living_tensors():
            try:
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # a tensor without memory, such as a fake one
            if tensor.device.type != "cpu" or not size:
                continue
            self._sizes[address] = size
            self._users[address] = self._users.get(address, 0) + 1
            self._references.append(
                weakref.ref(tensor, partial(self._release, address))
            )
        self._profiler.start()

    def stop(self, limit_bytes: int) -> Peak:
        self._profiler.stop()
        self._references.clear()
        before = [
            (0, MemoryEvent(("before", address), size))
            for address, size in self._sizes.items()
        ]
        released = [
            (time_ns, MemoryEvent(("before", address), -1))
            for time_ns, address in self._released
        ]
        events = sorted(
            [*before, *released, *self._allocations()], key=lambda event: event[0]
        )
        return replay(block for _, block in events)

    def _release(self, address: int, reference: Any) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self._released.append((time.time_ns(), address))

    def _allocations(self) -> Iterator[tuple[int, MemoryEvent]]:
        from torch._C._profiler import _EventType

        profiler = self._profiler.profiler
        assert profiler is not None
        pending = list(profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending += event.children
            kind, fields = event.typed
            if kind == _EventType.Allocation and fields.device.type == "cpu":
                site = _recorded_call_site(
                    event, (_EventType.PyCall, _EventType.PyCCall)
                )
                yield (
                    event.start_time_ns,
                    MemoryEvent(fields.ptr, fields.alloc_size, site),
                )


def _living_tensors() -> Iterator[torch.Tensor]:
    tensors = {
        id(item): item
        for item in gc.get_objects()
        if issubclass(type(item), torch.Tensor)
    }
    for tensor in list(tensors.values()):
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            tensors[id(gradient)] = gradient
    yield from tensors.values()


def _recorded_call_site(event: Any, calls: tuple[Any, ...]) -> str:
    """Return the innermost place in Python code outside of torch.

    `calls` are the kinds of event that are calls.
    """
    while (event := event.parent) is not None:
        kind, fields = event.typed
        if kind in calls and not fields.caller.file_name.startswith(("torch/", "<")):
            return (
                f"{fields.caller.function_name} "
                f"({fields.caller.file_name}:{fields.caller.line_number})"
            )
    return "outside of Python code"


_MAX_ENTRIES = 1_000_000


class CudaPeak:
    """Records the peak of torch's allocator on a device, and its history.

    The history is not recorded if the code records one itself.
    """

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
        """End, and return the peak. A snapshot takes long: the holders are listed only
        above the limit."""
        peak_bytes = torch.cuda.max_memory_allocated(self._index)
        holders: tuple[tuple[str, int], ...] = ()
        if self._records_history:
            if peak_bytes > limit_bytes:
                holders = replay(
                    snapshot_blocks(torch.cuda.memory._snapshot(), self._index)
                ).holders
            torch.cuda.memory._record_memory_history(enabled=None)
        return Peak(peak_bytes, holders)


def snapshot_blocks(snapshot: Any, index: int) -> Iterator[MemoryEvent]:
    """Yield the allocations and releases on a device in a memory snapshot.

    First come those before its history.
    """
    trace = [
        event
        for event in snapshot["device_traces"][index]
        if event["action"] in ("alloc", "free_requested")
    ]
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
                    yield MemoryEvent(
                        address, block.get("requested_size", block["size"])
                    )
                address += block["size"]
    for event in trace:
        is_allocation = event["action"] == "alloc"
        yield MemoryEvent(
            event["addr"],
            event["size"] if is_allocation else -1,
            _call_site(event.get("frames") or []),
        )


def _call_site(frames: list[Any]) -> str:
    """Return the innermost frame outside of torch.

    The frames begin with the innermost one.
    """
    for frame in frames:
        if "/torch/" not in frame["filename"] and not frame["filename"].startswith("<"):
            return f"{frame['name']} ({frame['filename']}:{frame['line']})"
    return "outside of Python code"


_MAX_LISTED = 10


class MemoryLimitExceeded(AssertionError):
    """The peak of memory in a block exceeded its limit.

    Attributes:
        device: The device.
        limit_bytes: The limit.
        peak_bytes: The peak.
        holders: (call site, bytes) at the peak, the largest first.
    """

    def __init__(self, device: str, limit_bytes: int, peak: Peak) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.peak_bytes = peak.bytes
        self.holders = list(peak.holders)
        lines = [
            f"the peak of memory on {device} is {bytes_text(peak.bytes)}, above the "
            f"limit of {bytes_text(limit_bytes)}"
        ]
        lines += [
            f"  {bytes_text(size):>12}  {site}"
            for site, size in self.holders[:_MAX_LISTED]
        ]
        if len(self.holders) > _MAX_LISTED:
            rest = sum(size for _, size in self.holders[_MAX_LISTED:])
            lines.append(
                f"  {bytes_text(rest):>12}  {len(self.holders) - _MAX_LISTED} other "
                "call sites"
            )
        super().__init__("\n".join(lines))


@contextmanager
def memory_limit(limit: ByteCount, device: str | None = None) -> Iterator[None]:
    """Fail if a block of code uses more memory than a limit, as a context manager or a
    decorator.

    On CUDA the peak is measured by torch's allocator (`max_memory_allocated`, which is
    reset), and includes what was allocated before the block. On the CPU it is the bytes
    of tensors, from torch's profiler: those that were alive before the block, as long
    as they live, and those that the block allocates. Memory that is not a tensor's does
    not count there.

    Args:
        limit: Bytes, as a number or as text like `500MB`, `20GB` or `2GiB`.
        device: `cpu`, `cuda` or `cuda:1`; None: the current CUDA device, and the CPU
            where there is none.

    Raises:
        SizeError: The limit is not a size.
        MemoryLimitExceeded: At the end of the block, where its peak exceeds the limit.
            An exception of the block itself is passed on instead.
    """
    limit_bytes = int(byte_count(limit, "limit"))
    recorder = _recorder(device)
    recorder.start()
    try:
        yield
    finally:
        peak = recorder.stop(limit_bytes)
    if peak.bytes > limit_bytes:
        raise MemoryLimitExceeded(recorder.device, limit_bytes, peak)


def _recorder(device: str | None) -> CpuPeak | CudaPeak:
    kind, _, number = (
        device or ("cuda" if torch.cuda.is_available() else "cpu")
    ).partition(":")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{device!r} is not a device: write cpu, cuda or cuda:1")
    if kind == "cpu":
        return CpuPeak()
    return CudaPeak(int(number) if number else torch.cuda.current_device())
