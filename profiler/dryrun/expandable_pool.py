"""A pool of the caching allocator with `expandable_segments`: one segment, to which memory is mapped page by page.

The rules are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ebbtide.profiler.dryrun.allocator_pools import (
    LARGE_SEGMENT,
    ROUNDING,
    SMALL_SEGMENT,
    AddressSpace,
    AllocatorBlock,
    BlockPool,
)
from ebbtide.profiler.dryrun.allocator_settings import AllocatorSettings

# Addresses of an expandable segment, more than any device has.
_EXPANDABLE_BYTES = 1 << 44


class ExpandablePool(BlockPool):
    """The blocks of a pool in one segment that grows."""

    def __init__(self, small: bool, settings: AllocatorSettings, space: AddressSpace) -> None:
        super().__init__(small, settings, space)
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        # By address.
        self._unmapped: list[int] = []
        self._unmapped_blocks: dict[int, AllocatorBlock] = {}

    def segment_bytes(self, size: int) -> int:
        return -(-size // self._page) * self._page

    def splits(self, block: AllocatorBlock, size: int) -> bool:
        return block.size - size >= ROUNDING

    def grow(self, size: int) -> AllocatorBlock:
        block = self._expandable(size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.size, block.next.size))
        self.discard(block)
        return block

    def release_cached(self) -> None:
        for block in list(self._blocks.values()):
            self._unmap(block)

    def discard(self, block: AllocatorBlock) -> None:
        if block.mapped:
            super().discard(block)
            return
        block.free = False
        del self._unmapped[bisect_left(self._unmapped, block.address)]
        del self._unmapped_blocks[block.address]

    def _insert(self, block: AllocatorBlock) -> None:
        if block.mapped:
            super()._insert(block)
        else:
            insort(self._unmapped, block.address)
            self._unmapped_blocks[block.address] = block

    def _best_fit(self, index: int) -> int:
        """Count a block that can expand with the size that it can have."""
        while index + 1 < len(self._keys) and _expanded(self._block_at(index + 1)) < _expanded(self._block_at(index)):
            index += 1
        return index

    def _expandable(self, size: int) -> AllocatorBlock:
        """Return the first free block that has `size` free addresses from its start on, mapped or not."""
        for address in self._unmapped:
            block = self._unmapped_blocks[address]
            if block.previous is not None and block.previous.free:
                block = block.previous
            if _free_addresses(block, size) >= size:
                return block
        start = self.space.take(_EXPANDABLE_BYTES, self._page)
        block = AllocatorBlock(start, _EXPANDABLE_BYTES, self, free=True, mapped=False)
        self._insert(block)
        return block

    def _map(self, block: AllocatorBlock, size: int) -> AllocatorBlock:
        """Map memory to the first `size` bytes of a block and return it, with its neighbours that are mapped."""
        pages = self.segment_bytes(size)
        self.discard(block)
        block.free = block.mapped = True
        if pages < block.size:
            rest = block.cut(pages)
            rest.mapped = False
            self._insert(rest)
        self.reserved_bytes += pages
        self.segments_allocated += 1
        self.add(block)
        return block

    def _unmap(self, block: AllocatorBlock) -> None:
        """Give back the pages that lie in a free block as a whole."""
        start = -(-block.address // self._page) * self._page
        end = (block.address + block.size) // self._page * self._page
        if start >= end:
            return
        self.discard(block)
        block.free = True
        if end < block.address + block.size:
            self._insert(block.cut(end - block.address))
        if start > block.address:
            before, block = block, block.cut(start - block.address)
            self._insert(before)
        self.reserved_bytes -= block.size
        block.mapped = False
        self.add(block)


def _expanded(block: AllocatorBlock) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _free_addresses(block: AllocatorBlock | None, wanted: int) -> int:
    size = 0
    while size < wanted and block is not None and block.free:
        size += block.size
        block = block.next
    return size
