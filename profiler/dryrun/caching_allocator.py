"""The segments that torch's CUDA caching allocator would take from the device for a sequence of allocations."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

# Constants of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h.
ROUNDING = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_LARGE = 10 << 20
_LARGE_ROUNDING = 2 << 20


def round_size(size: int) -> int:
    """Return the bytes of the block that a request of `size` bytes gets."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


@dataclass(eq=False)
class AllocatorBlock:
    """A block of a segment.

    Attributes:
        address: Its address in the simulation.
        size: Its bytes.
        pool: The free blocks of its pool.
        free: Whether nobody uses it.
        previous, next: Its neighbours in the segment.
    """

    address: int
    size: int
    pool: _FreeBlocks = field(repr=False)
    free: bool = False
    previous: AllocatorBlock | None = field(default=None, repr=False)
    next: AllocatorBlock | None = field(default=None, repr=False)


class _FreeBlocks:
    """The free blocks of one pool, by size and address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, AllocatorBlock] = {}

    def add(self, block: AllocatorBlock) -> None:
        block.free = True
        insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: AllocatorBlock) -> None:
        block.free = False
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def best_fit(self, size: int) -> AllocatorBlock | None:
        index = bisect_left(self._keys, (size, 0))
        return self._blocks[self._keys[index][1]] if index < len(self._keys) else None

    def whole_segments(self) -> list[AllocatorBlock]:
        return [block for block in self._blocks.values() if block.previous is None and block.next is None]


class CachingAllocator:
    """Torch's allocator on one stream with its default settings (no expandable segments).

    Attributes:
        allocated_bytes: Bytes of the blocks in use.
        reserved_bytes: Bytes of the segments.
        segments_allocated: How many segments were taken from the device so far.
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = self.segments_allocated = 0
        self._pools = {True: _FreeBlocks(True), False: _FreeBlocks(False)}
        self._next_address = _LARGE_ROUNDING

    def allocate(self, size: int) -> AllocatorBlock:
        """Return a block for a request of `size` bytes, from the smallest free block that fits or a new segment."""
        size = round_size(size)
        pool = self._pools[size <= _SMALL]
        block = pool.best_fit(size)
        if block is None:
            block = self._new_segment(size, pool)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= ROUNDING if pool.small else rest > _SMALL:
            self._split(block, size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Give a block back; it becomes one with its free neighbours."""
        self.allocated_bytes -= block.size
        before, after = block.previous, block.next
        if before is not None and before.free:
            block.pool.remove(before)
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free:
            block.pool.remove(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment without a block in use back to the device."""
        for pool in self._pools.values():
            for block in pool.whole_segments():
                pool.remove(block)
                self.reserved_bytes -= block.size

    def _new_segment(self, size: int, pool: _FreeBlocks) -> AllocatorBlock:
        segment = _segment_size(size)
        block = AllocatorBlock(self._next_address, segment, pool)
        self._next_address += -(-segment // _LARGE_ROUNDING) * _LARGE_ROUNDING
        self.reserved_bytes += segment
        self.segments_allocated += 1
        return block

    def _split(self, block: AllocatorBlock, size: int) -> None:
        rest = AllocatorBlock(block.address + size, block.size - size, block.pool, True, block, block.next)
        if block.next is not None:
            block.next.previous = rest
        block.size, block.next = size, rest
        block.pool.add(rest)


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE:
        return _LARGE_SEGMENT
    return -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
