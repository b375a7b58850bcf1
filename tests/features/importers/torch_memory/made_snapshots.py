"""Memory snapshots as torch writes them, made by hand or by a simulated allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

START_US = 1_700_000_000_000_000


def event(action: str, size: int, offset_us: int = 0, addr: int = 0) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": START_US + offset_us,
        "frames": [],
    }


def segment(
    size: int, *requested: int, device: int = 0, state: str = "active_allocated"
) -> dict[str, Any]:
    """Return a segment with blocks for the requested sizes, and an inactive block
    behind them."""
    blocks = [
        {"size": -(-ask // 512) * 512, "requested_size": ask, "state": state}
        for ask in requested
    ]
    inactive = {
        "size": size - sum(block["size"] for block in blocks),
        "requested_size": 0,
        "state": "inactive",
    }
    return {
        "device": device,
        "address": 0,
        "total_size": size,
        "blocks": [*blocks, inactive],
    }


class Allocator:
    """Simulated allocator of one device that records its events, and its sizes in bytes
    after each of them.

    Attributes:
        events: The events.
        requested: Bytes of blocks whose release was not requested.
        active: Bytes of all blocks that are not released.
        reserved: Bytes of segments.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.requested: list[int] = []
        self.active: list[int] = []
        self.reserved: list[int] = []
        self.blocks: dict[int, tuple[int, str]] = {}
        self.segments: dict[int, int] = {}
        self._next = 0

    def act(self, action: str, size: int, addr: int) -> None:
        self.events.append(event(action, size, len(self.events), addr))
        self.requested.append(
            sum(
                size
                for size, state in self.blocks.values()
                if state == "active_allocated"
            )
        )
        self.active.append(sum(size for size, _ in self.blocks.values()))
        self.reserved.append(sum(self.segments.values()))

    def alloc(self, size: int, expandable: bool) -> None:
        self._next += 1 << 30
        self.segments[self._next] = -(-size // (2 << 20)) * (2 << 20)
        self.act(
            "segment_map" if expandable else "segment_alloc",
            self.segments[self._next],
            self._next,
        )
        self.blocks[self._next] = size, "active_allocated"
        self.act("alloc", size, self._next)

    def free(self, addr: int, later: bool) -> None:
        size, _ = self.blocks[addr]
        self.blocks[addr] = size, "active_awaiting_free"
        self.act("free_requested", size, addr)
        if not later:
            self.complete(addr)

    def complete(self, addr: int) -> None:
        size, _ = self.blocks.pop(addr)
        self.act("free_completed", size, addr)

    def give_back(self, addr: int, expandable: bool) -> None:
        size = self.segments.pop(addr)
        self.act("segment_unmap" if expandable else "segment_free", size, addr)

    def snapshot(self, first: int) -> dict[str, Any]:
        """Return the snapshot that torch would write, with the events from `first`
        on."""
        segments = []
        for addr, size in self.segments.items():
            parts = [self.blocks[addr]] if addr in self.blocks else []
            blocks = [
                {"size": ask, "requested_size": ask, "state": state}
                for ask, state in parts
            ]
            blocks.append(
                {"size": size - sum(ask for ask, _ in parts), "state": "inactive"}
            )
            segments.append(
                {"device": 0, "address": addr, "total_size": size, "blocks": blocks}
            )
        return {"segments": segments, "device_traces": [self.events[first:]]}


def job(acts: Sequence[tuple[int, int, bool, bool]]) -> Allocator:
    """Run an allocator through drawn actions: (action, size, whether expandable,
    whether the release waits)."""
    allocator = Allocator()
    for what, size, expandable, later in acts:
        allocated = [
            addr
            for addr, (_, state) in allocator.blocks.items()
            if state == "active_allocated"
        ]
        waiting = [addr for addr in allocator.blocks if addr not in allocated]
        unused = [addr for addr in allocator.segments if addr not in allocator.blocks]
        if what == 1 and allocated:
            allocator.free(allocated[size % len(allocated)], later)
        elif what == 2 and waiting:
            allocator.complete(waiting[size % len(waiting)])
        elif what == 3 and unused:
            allocator.give_back(unused[size % len(unused)], expandable)
        else:
            allocator.alloc(size, expandable)
    return allocator
