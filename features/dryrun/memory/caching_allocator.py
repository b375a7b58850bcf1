"""The segments that torch's CUDA caching allocator would take from the device for a
sequence of allocations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ebbtide.features.dryrun.memory.allocator_pools import (
    ROUNDING,
    SMALL,
    AddressSpace,
    AllocatorBlock,
    AllocatorSettings,
    BlockPool,
    ExpandablePool,
)

# Memory of a device that the CUDA context takes, where kernels are loaded when they
# first run (CUDA 11.7 and later): at most 0.11 GB on an RTX 4060 and 0.15 GB on an RTX
# 3060, which jobs filled so far (`benchmarks/memory_estimates.py`), and 0.35 GB in a
# process on the H100 of traces/. It grows with the multiprocessors.
_CONTEXT_BYTES, _MULTIPROCESSOR_BYTES = 60_000_000, 2_200_000


def context_bytes(multiprocessors: int) -> int:
    """Return the memory that the CUDA context takes on a GPU."""
    return _CONTEXT_BYTES + multiprocessors * _MULTIPROCESSOR_BYTES


def device_allocator(capacity_bytes: int | None, context: int) -> CachingAllocator:
    """Return the allocator of a GPU with the settings of the environment, beside the
    CUDA context."""
    limit = None if capacity_bytes is None else capacity_bytes - context
    return CachingAllocator(AllocatorSettings.from_environment, limit)


class CachingAllocator:
    """Torch's allocator, by the rules of c10/cuda/CUDACachingAllocator.cpp.

    Args:
        make_settings: Returns its settings; called at the first allocation, as torch
            reads them.
        capacity_bytes: Memory for segments: before they need more, those without a
            block in use are given back. A job that needs more is not stopped. None: no
            limit.

    `retries`: how often segments were given back, since no memory was left;
    `on_shortage` is called with the bytes of a request where that was not enough, and
    may raise an error.
    """

    def __init__(
        self,
        make_settings: Callable[[], AllocatorSettings] = AllocatorSettings,
        capacity_bytes: int | None = None,
    ) -> None:
        self._make_settings = make_settings
        self.on_shortage: Callable[[int], None] = lambda _size: None
        self.allocated_bytes = self.retries = 0
        self._capacity_bytes = capacity_bytes
        self._space = AddressSpace()
        # (stream, whether it is that of small blocks) -> pool
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        # Blocks that were given back while another stream uses them: until when, and
        # the block.
        self._awaited: list[tuple[int, AllocatorBlock]] = []

    @cached_property
    def settings(self) -> AllocatorSettings:
        return self._make_settings()

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._pools.values())

    @property
    def segments_allocated(self) -> int:
        """Number of segments that were taken from the device so far."""
        return sum(pool.segments_allocated for pool in self._pools.values())

    def round_size(self, size: int) -> int:
        """Return the bytes of the block that a request of `size` bytes gets."""
        divisions = self.settings.divisions_of(size)
        if divisions > 1 and size > ROUNDING * divisions:
            return _next_division(size, divisions)
        return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)

    def allocate(
        self, size: int, stream: int = 0, now_ns: int = 0, always: bool = True
    ) -> Any:
        """Return a block for a request of `size` bytes on a stream; None if no memory
        is left and it is not `always`.

        The block is the smallest free one of that stream that fits, or a part of a new
        segment. At `now_ns`, blocks that other streams have used until then become
        free."""
        self._free_awaited(now_ns)
        size = self.round_size(size)
        pool = self._pool(stream, size <= SMALL)
        block = pool.take(size)
        if block is None:
            if not self._make_room(pool.segment_bytes(size)):
                if not always:
                    return None
                self.on_shortage(size)
            block = pool.grow(size)
        if pool.splits(block, size):
            pool.add(block.cut(size))
        self.allocated_bytes += block.size
        return block

    def free(self, block: AllocatorBlock, until_ns: int | None = None) -> None:
        """Give a block back. until_ns: when other streams have used it; None: no other
        stream has."""
        self.allocated_bytes -= block.size
        if until_ns is None:
            block.pool.add(block)
        else:
            self._awaited.append((until_ns, block))

    def set_limit(self, limit_bytes: int) -> None:
        """Reserve at most so many bytes, as the job asks for with a share of the
        device."""
        self._capacity_bytes = min(limit_bytes, self._capacity_bytes or limit_bytes)

    def empty_cache(self) -> None:
        """Give the device all memory without a block in use, after the streams have
        finished."""
        for _, block in self._awaited:
            block.pool.add(block)
        self._awaited.clear()
        for pool in self._pools.values():
            pool.release_cached()

    def notes(self) -> list[str]:
        """Return lines for people: its settings, and shortage of memory."""
        notes = []
        if self.settings != AllocatorSettings():
            notes.append(
                f"settings of the caching allocator: {self.settings.description}"
            )
        if self.retries:
            notes.append(
                f"the caching allocator had no memory left {self.retries:,} times, and "
                "gave cached segments back: on a "
                "GPU this makes the job slow"
            )
        return notes

    def _pool(self, stream: int, small: bool) -> BlockPool:
        key = stream, small
        if key not in self._pools:
            kind = ExpandablePool if self.settings.expandable else BlockPool
            self._pools[key] = kind(small, self.settings, self._space)
        return self._pools[key]

    def _make_room(self, size: int) -> bool:
        """Give segments back where memory is short, and return whether there is room
        then."""
        if self._fits(size):
            return True
        self.retries += 1
        self.empty_cache()
        return self._fits(size)

    def _fits(self, size: int) -> bool:
        return (
            self._capacity_bytes is None
            or self.reserved_bytes + size <= self._capacity_bytes
        )

    def _free_awaited(self, now_ns: int) -> None:
        if not self._awaited:
            return
        done = [block for until_ns, block in self._awaited if until_ns <= now_ns]
        self._awaited = [entry for entry in self._awaited if entry[0] > now_ns]
        for block in done:
            block.pool.add(block)


def _next_division(size: int, divisions: int) -> int:
    """Round a size up to one of the steps between two powers of two."""
    if size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return floor << 1 if step == 0 else -(-size // step) * step
