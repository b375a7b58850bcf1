"""Pools of the caching allocator: the blocks of one stream and one class of sizes, and
the segments they lie in.

The rules are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ebbtide.features.dryrun.errors import DryRunError

# In the order of their priority, as in c10/cuda/CUDAAllocatorConfig.h.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MIB = 1 << 20
# Sizes are rounded by the power of two below them, from 1 MiB on.
_INTERVALS = 16
_ENTRY = re.compile(r"(\w+):(\[[^\]]*\]|[^,]+)")
# Constants of c10/core/AllocatorConfig.h.
ROUNDING = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
LARGE_ROUNDING = 2 << 20
# Addresses of an expandable segment, more than any device has.
EXPANDABLE_BYTES = 1 << 44


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the allocator."""

    expandable: bool = False
    # Blocks of this size and more are not split; None: all are.
    max_split_bytes: int | None = None
    # Steps between two powers of two to which sizes are rounded, by the power of two
    # from 1 MiB on; 1 or less: sizes are not rounded so.
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        name = next((name for name in VARIABLES if name in os.environ), None)
        if name is None:
            return cls()
        try:
            return cls.parse(os.environ[name])
        except (ValueError, IndexError) as error:
            raise DryRunError(
                f"{name} is {os.environ[name]!r}, which torch cannot read: correct it"
            ) from error

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings of a text as
        `expandable_segments:True,max_split_size_mb:64`."""
        text = text.replace(" ", "")
        entries = _ENTRY.findall(text)
        if ",".join(f"{key}:{value}" for key, value in entries) != text.strip(","):
            raise ValueError(text)
        expandable, max_split_bytes, divisions, ignored = False, None, cls.divisions, []
        for key, value in entries:
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(value)
                expandable = value == "True"
            elif key == "max_split_size_mb":
                max_split_bytes = int(value) * _MIB
            elif key == "roundup_power2_divisions":
                divisions = _divisions(value)
            else:
                ignored.append(key)
        return cls(expandable, max_split_bytes, divisions, tuple(ignored))

    @property
    def description(self) -> str:
        """The settings that are not the default ones, in words."""
        words = ["expandable_segments"] if self.expandable else []
        if self.max_split_bytes is not None:
            words.append(f"max_split_size {self.max_split_bytes >> 20:,} MiB")
        if any(self.divisions):
            words.append("roundup_power2_divisions")
        words += [f"{name} (has no effect here)" for name in self.ignored]
        return ", ".join(words)

    def divisions_of(self, size: int) -> int:
        """Return the steps to which a size is rounded."""
        return self.divisions[
            min(max(size.bit_length() - _MIB.bit_length(), 0), _INTERVALS - 1)
        ]


def _divisions(value: str) -> tuple[int, ...]:
    """Return the steps of each interval, from a number for all or a list as
    `[256:1,512:2,>:8]` of sizes in MiB."""
    if not value.startswith("["):
        return (int(value),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, 0
    for position, entry in enumerate(value[1:-1].split(",")):
        bound, _, steps = entry.partition(":")
        if bound == ">":
            divisions[last:] = [int(steps)] * (_INTERVALS - last)
            continue
        last = min(int(bound).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            divisions[:last] = [int(steps)] * last
        divisions[last] = int(steps)
    return tuple(divisions)


@dataclass(eq=False)
class AllocatorBlock:
    """A block of a segment."""

    address: int
    size: int
    pool: BlockPool = field(repr=False)
    free: bool = False
    mapped: bool = True
    previous: AllocatorBlock | None = field(default=None, repr=False)
    next: AllocatorBlock | None = field(default=None, repr=False)

    def cut(self, size: int) -> AllocatorBlock:
        """Keep `size` bytes, and return a block of the others, which follows."""
        rest = AllocatorBlock(
            self.address + size,
            self.size - size,
            self.pool,
            self.free,
            self.mapped,
            self,
            self.next,
        )
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

    `segments_allocated`: how many segments, or ranges of an expandable one, were taken
    so far."""

    def __init__(
        self, small: bool, settings: AllocatorSettings, space: AddressSpace
    ) -> None:
        self.small, self.settings, self.space = small, settings, space
        self.reserved_bytes = self.segments_allocated = 0
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, AllocatorBlock] = {}

    def segment_bytes(self, size: int) -> int:
        """Return the bytes that a new segment for a block of `size` bytes takes."""
        if self.small:
            return SMALL_SEGMENT
        return (
            LARGE_SEGMENT
            if size < MIN_LARGE
            else -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        )

    def take(self, size: int) -> AllocatorBlock | None:
        """Return the smallest free block that fits and may be used; None if there is
        none."""
        index = self._best_fit(bisect_left(self._keys, (size, 0)))
        if index >= len(self._keys):
            return None
        block = self._block_at(index)
        limit = self.settings.max_split_bytes
        if limit is not None and (
            block.size >= limit if size < limit else block.size >= size + LARGE_SEGMENT
        ):
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
        return rest > SMALL and (
            self.settings.max_split_bytes is None
            or size < self.settings.max_split_bytes
        )

    def add(self, block: AllocatorBlock) -> None:
        """Add a free block, which becomes one with its free neighbours."""
        for other in (block.previous, block.next):
            if other is not None and other.free and other.mapped == block.mapped:
                self.discard(other)
                first, last = (
                    (other, block) if other is block.previous else (block, other)
                )
                block.address, block.previous, block.next = (
                    first.address,
                    first.previous,
                    last.next,
                )
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


class ExpandablePool(BlockPool):
    """The blocks of a pool in one segment that grows."""

    def __init__(
        self, small: bool, settings: AllocatorSettings, space: AddressSpace
    ) -> None:
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
        while index + 1 < len(self._keys) and _expanded(
            self._block_at(index + 1)
        ) < _expanded(self._block_at(index)):
            index += 1
        return index

    def _expandable(self, size: int) -> AllocatorBlock:
        """Return the first free block that has `size` free addresses from its start on,
        mapped or not."""
        for address in self._unmapped:
            block = self._unmapped_blocks[address]
            if block.previous is not None and block.previous.free:
                block = block.previous
            if _free_addresses(block, size) >= size:
                return block
        start = self.space.take(EXPANDABLE_BYTES, self._page)
        block = AllocatorBlock(start, EXPANDABLE_BYTES, self, free=True, mapped=False)
        self._insert(block)
        return block

    def _map(self, block: AllocatorBlock, size: int) -> AllocatorBlock:
        """Map memory to the first `size` bytes of a block and return it, with its
        neighbours that are mapped."""
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
    return block.size + (
        block.next.size if block.next is not None and not block.next.mapped else 0
    )


def _free_addresses(block: AllocatorBlock | None, wanted: int) -> int:
    size = 0
    while size < wanted and block is not None and block.free:
        size += block.size
        block = block.next
    return size
