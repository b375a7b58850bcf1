"""Copies between host memory and the faked device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbtide.profiler.dryrun.clock import LaunchedCopy, VirtualClock


@dataclass(frozen=True)
class FakeTransfer:
    """A copy: its times in ns, direction (`h2d`, `d2h`), bytes, and `host_memory` (`pinned` or `pageable`)."""

    times: LaunchedCopy
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

    def add(self, direction: str, size: int, host_tensor: Any = None, blocking: bool = True) -> None:
        """Add a copy of `size` bytes that is launched now; `blocking`: whether the host waits for it."""
        if self._closed or not size:
            return
        pinned = host_tensor is not None and host_tensor.is_pinned()
        times = self._clock.run_copy(direction, size, pinned, blocking)
        self.rows.append(FakeTransfer(times, direction, size, "pinned" if pinned else "pageable"))

    def close(self) -> None:
        """Count nothing any more."""
        self._closed = True
