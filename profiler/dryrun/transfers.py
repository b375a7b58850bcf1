"""Copies between host memory and the faked device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.dryrun.clock import VirtualClock


@dataclass(frozen=True)
class FakeTransfer:
    """A copy: its times in ns, direction (`h2d`, `d2h`), bytes, and `host_memory` (`pinned` or `pageable`)."""

    start_ns: int
    end_ns: int
    direction: str
    size: int
    host_memory: str


class Transfers:
    """The copies so far.

    Attributes:
        rows: The copies in order.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.rows: list[FakeTransfer] = []
        self._clock = clock
        self._closed = False

    def add(self, direction: str, size: int, host_tensor: Any = None) -> None:
        """Add a copy of `size` bytes that starts now."""
        if self._closed or not size:
            return
        pinned = host_tensor is not None and host_tensor.is_pinned()
        start_ns = self._clock.tick()
        self._clock.run_copy(direction, size)
        row = FakeTransfer(start_ns, self._clock.now_ns, direction, size, "pinned" if pinned else "pageable")
        self.rows.append(row)

    def close(self) -> None:
        """Count nothing any more."""
        self._closed = True
