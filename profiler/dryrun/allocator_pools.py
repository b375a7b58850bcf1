"""Pools of the caching allocator: the blocks of one stream and one class of sizes, and the segments they lie in.

The rules are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ebbtide.profiler.dryrun.allocator_settings import AllocatorSettings

# Constants of c10/core/AllocatorConfig.h.
ROUNDING = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
LARGE_ROUNDING = 2 << 20


@dataclass(eq=False)
class AllocatorBlock:
    """A block of a segment.

    Attributes:
        address: Its address in the simulation.
        size: Its bytes.
        pool: Its pool.
        free: Whether nobody uses it.
        mapped: Whether memory lies behind its addresses.
        previous, next: Its neighbours in the segment.
    """

    address: int
    size: int
    pool: BlockPool = field(repr=False)
    free: bool = False
    mapped: bool = True
    previous: AllocatorBlock | None = field(default=None, repr=False)
    next: AllocatorBlock | None = field(default=None, repr=False)

    def cut(self, size: int) -> AllocatorBlock:
        """Keep `size` bytes, and return a block of the others, which follows."""
        rest = AllocatorBlock(self.address + size, self.size - size, self.pool, self.free, self.mapped, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.size, self.next = size, rest
        return rest


class AddressSpace:
    """Gives each segment addresses of its own."""

    def __init__(self) -> None:
        self._next = LARGE_ROUNDING

    def take(self, size: int, alignment: int = LARGE_ROUNDING) -> int:
        """Return the first of `size` free addresses, a multiple of `alignment`."""
        address = -(-self._next // alignment) * alignment
        self._next = address + -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        return address


class BlockPool:
    """The blocks of a pool, in segments of fixed sizes.

    Args:
        small: Whether it is that of blocks up to 1 MiB.
        settings: The settings of the allocator.
        space: The addresses.

    Attributes:
        reserved_bytes: Bytes of its segments.
        segments_allocated: How many segments, or ranges of an expandable one, were taken so far.
    """

    def __init__(self, small: bool, settings: AllocatorSettings, space: AddressSpace) -> None:
        self.small, self.settings, self.space = small, settings, space
        self.reserved_bytes = self.segments_allocated = 0
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, AllocatorBlock] = {}

    def segment_bytes(self, size: int) -> int:
        """Return the bytes that a new segment for a block of `size` bytes takes."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < MIN_LARGE else -(-size // LARGE_ROUNDING) * LARGE_ROUNDING

    def take(self, size: int) -> AllocatorBlock | None:
        """Return the smallest free block that fits and may be used; None if there is none."""
        index = self._best_fit(bisect_left(self._keys, (size, 0)))
        if index >= len(self._keys):
            return None
        block = self._block_at(index)
        limit = self.settings.max_split_bytes
        if limit is not None and (block.size >= limit if size < limit else block.size >= size + LARGE_SEGMENT):
            return None
        self.discard(block)
        return block

    def grow(self, size: int) -> AllocatorBlock:
        """Return a block of at least `size` bytes in new memory."""
        segment = self.segment_bytes(size)
        self.reserved_bytes += segment
        self.segments_allocated += 1
        return AllocatorBlock(self.space.take(segment), segment, self)

    def splits(self, block: AllocatorBlock, size: int) -> bool:
        """Return whether what remains of a block is a block of its own."""
        rest = block.size - size
        if self.small:
            return rest >= ROUNDING
        return rest > SMALL and (self.settings.max_split_bytes is None or size < self.settings.max_split_bytes)

    def add(self, block: AllocatorBlock) -> None:
        """Add a free block, which becomes one with its free neighbours."""
        for other in (block.previous, block.next):
            if other is not None and other.free and other.mapped == block.mapped:
                self.discard(other)
                first, last = (other, block) if other is block.previous else (block, other)
                block.address, block.previous, block.next = first.address, first.previous, last.next
                block.size += other.size
                if block.previous is not None:
                    block.previous.next = block
                if block.next is not None:
                    block.next.previous = block
        block.free = True
        self._insert(block)

    def release_cached(self) -> None:
        """Give the device every segment without a block in use."""
        for block in list(self._blocks.values()):
            if block.previous is None and block.next is None:
                self.discard(block)
                self.reserved_bytes -= block.size

    def discard(self, block: AllocatorBlock) -> None:
        """Remove a free block."""
        block.free = False
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def _insert(self, block: AllocatorBlock) -> None:
        insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def _best_fit(self, index: int) -> int:
        """Return the position of the block to take, of those from a position on."""
        return index

    def _block_at(self, index: int) -> AllocatorBlock:
        return self._blocks[self._keys[index][1]]
