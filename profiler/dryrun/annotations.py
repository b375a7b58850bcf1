"""Ranges that the job names, by `record_function` and NVTX."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class NamedRange:
    """A range: its host times in ns, its name, and the number of its thread (0: the first that named one)."""

    start_ns: int
    end_ns: int
    name: str
    thread: int


class NamedRanges:
    """The ranges so far.

    Attributes:
        rows: Finished ranges, in the order of their ends.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.rows: list[NamedRange] = []
        self._clock = clock
        self._threads: dict[int, int] = {}
        # Ranges that are open: by thread for nested ones, else by their handle.
        self._nested: dict[int, list[tuple[str, int]]] = {}
        self._open: dict[int, tuple[str, int]] = {}
        self._handles = 0
        self._closed = False

    def install(self, patches: Patches) -> None:
        """Follow ranges until `patches.undo()`."""
        kind = torch_profiler.record_function
        enter, leave = kind.__enter__, kind.__exit__

        def enter_range(this: Any) -> Any:
            self.push(this.name)
            return enter(this)

        def leave_range(this: Any, *error: Any) -> Any:
            self.pop()
            return leave(this, *error)

        patches.set(kind, "__enter__", enter_range)
        patches.set(kind, "__exit__", leave_range)
        for name, function in {
            "range_push": self.push,
            "range_pop": self.pop,
            "range_start": self.start,
            "range_end": self.end,
        }.items():
            patches.set(torch.cuda.nvtx, name, function)

    def push(self, name: str) -> int:
        """Open a range inside the last one of this thread, and return its depth."""
        ranges = self._nested.setdefault(self._thread(), [])
        ranges.append((name, self._clock.tick()))
        return len(ranges) - 1

    def pop(self) -> int:
        """Close the last range of this thread, and return its depth; -1 if none is open."""
        thread = self._thread()
        ranges = self._nested.get(thread)
        if not ranges:
            return -1
        self._add(*ranges.pop(), thread)
        return len(ranges)

    def start(self, name: str, *_stream: Any) -> int:
        """Open a range that may overlap others, and return its handle."""
        self._handles += 1
        self._open[self._handles] = name, self._clock.tick()
        return self._handles

    def end(self, handle: int, *_stream: Any) -> None:
        """Close a range by its handle."""
        if handle in self._open:
            self._add(*self._open.pop(handle), self._thread())

    def close(self) -> None:
        """Close the open ranges, and follow none any more."""
        if self._closed:
            return
        for thread, ranges in self._nested.items():
            while ranges:
                self._add(*ranges.pop(), thread)
        self._closed = True

    def _add(self, name: str, start_ns: int, thread: int) -> None:
        if not self._closed:
            self.rows.append(NamedRange(start_ns, self._clock.tick(), str(name), thread))

    def _thread(self) -> int:
        return self._threads.setdefault(threading.get_ident(), len(self._threads))
