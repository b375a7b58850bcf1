"""Replays allocations and releases, and finds the blocks that are held at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

BEFORE = "allocated before the block"


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation, or a release.

    Attributes:
        key: Address of the block, or another object that its allocation and its release have in common.
        bytes: Bytes; negative for a release, which may have any negative number.
        site: The place in the code that allocated it.
    """

    key: Hashable
    bytes: int
    site: str = BEFORE


@dataclass(frozen=True)
class Peak:
    """The largest memory in use, and its holders.

    Attributes:
        bytes: Bytes in use at the peak.
        holders: (call site, bytes), the largest first; empty where they were not asked for.
    """

    bytes: int
    holders: tuple[tuple[str, int], ...] = ()


def replay(events: Iterable[MemoryEvent]) -> Peak:
    """Return the peak of events in order. Releases of blocks that were never allocated are ignored."""
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
