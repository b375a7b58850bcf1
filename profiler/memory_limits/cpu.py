"""Records the bytes of tensors in host memory, with torch's profiler."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ebbtide.profiler.memory_limits.held_blocks import MemoryEvent, Peak, replay


class CpuPeak:
    """Records the tensors that are alive at the start, until each is released, and all allocations until the end."""

    device = "cpu"

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=True
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
            self._references.append(weakref.ref(tensor, partial(self._release, address)))
        self._profiler.start()

    def stop(self, limit_bytes: int) -> Peak:
        """End, and return the peak."""
        self._profiler.stop()
        self._references.clear()
        before = [(0, MemoryEvent(("before", address), size)) for address, size in self._sizes.items()]
        released = [(time_ns, MemoryEvent(("before", address), -1)) for time_ns, address in self._released]
        events = sorted([*before, *released, *self._allocations()], key=lambda event: event[0])
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
                site = _call_site(event, (_EventType.PyCall, _EventType.PyCCall))
                yield event.start_time_ns, MemoryEvent(fields.ptr, fields.alloc_size, site)


def _living_tensors() -> Iterator[torch.Tensor]:
    tensors = {id(item): item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)}
    for tensor in list(tensors.values()):
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            tensors[id(gradient)] = gradient
    yield from tensors.values()


def _call_site(event: Any, calls: tuple[Any, ...]) -> str:
    """Return the innermost place in Python code outside of torch; `calls` are the kinds of event that are calls."""
    while (event := event.parent) is not None:
        kind, fields = event.typed
        if kind in calls and not fields.caller.file_name.startswith(("torch/", "<")):
            return f"{fields.caller.function_name} ({fields.caller.file_name}:{fields.caller.line_number})"
    return "outside of Python code"
