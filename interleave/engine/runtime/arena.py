"""Device memory for state: allocated when a plan is set, and handed out to the operations of the plan."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.interleave.engine.devices.device import Device, Mark

_WIDTH = torch.float32.itemsize


@dataclass
class Block:
    """Device memory of an arena.

    Attributes:
        memory: The memory, one dimension, fp32.
        marks: What a stream must wait for before it uses the memory.
    """

    memory: torch.Tensor
    marks: Sequence[Mark]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return len(self.memory)


class Arena:
    """Hands out device memory in blocks, and gets them back when their last use is issued.

    A block that comes back is handed out again at once: the next stream waits for the mark of its last use. So
    operations allocate nothing, except in memory that is free for a part of an iteration only: that is allocated when
    an operation needs it, and released to the job after its last use.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Block] = []
        self._total_bytes = 0
        # What blocks may hold: while they are in use, and at any time.
        self._max_bytes = 0.0
        self._kept_bytes = 0.0
        self._lock = threading.Lock()

    def reserve(self, sizes: Sequence[int], kept_bytes: float) -> None:
        """Hold free blocks of these sizes and no others. No operation may run meanwhile.

        Args:
            sizes: Number of elements of each block, besides the blocks in use.
            kept_bytes: The memory that may be held during the whole iteration. Further blocks are allocated by `take`.

        Raises:
            DeviceMemoryError: If the device has too little free memory.
        """
        with self._lock:
            missing = Counter(sizes)
            kept = []
            for block in self._free:
                if missing[block.elements]:
                    missing[block.elements] -= 1
                    kept.append(block)
                else:
                    self._release(block)
            self._free = kept
            self._max_bytes = self._total_bytes + _WIDTH * sum(missing.elements())
            self._kept_bytes = min(self._max_bytes, kept_bytes)
            for elements in sorted(missing.elements(), reverse=True):
                if self._total_bytes + _WIDTH * elements <= self._kept_bytes:
                    self._free.append(self._allocate(elements))

    def fits(self, elements: int) -> bool:
        """Return whether `take` has a block of so many elements now."""
        with self._lock:
            has_block = any(block.elements >= elements for block in self._free)
            return has_block or self._total_bytes + _WIDTH * elements <= self._max_bytes

    def take(self, elements: int) -> Block:
        """Return a block of at least so many elements: the smallest free one, or else a new one.

        Raises:
            DeviceMemoryError: If the device has too little free memory.
        """
        with self._lock:
            large_enough = [block for block in self._free if block.elements >= elements]
            if not large_enough:
                return self._allocate(elements)
            block = min(large_enough, key=lambda block: block.elements)
            self._remove(block)
            return block

    def give(self, block: Block, mark: Mark) -> None:
        """Take a block back, whose last use is before a mark."""
        block.marks = [mark]
        with self._lock:
            self._free.append(block)

    def trim(self) -> None:
        """Release free blocks beyond the memory that may be held during the whole iteration."""
        with self._lock:
            for block in [block for block in self._free if all(mark.is_passed for mark in block.marks)]:
                if self._total_bytes <= self._kept_bytes:
                    return
                self._remove(block)
                self._release(block)

    def release(self) -> None:
        """Release all free blocks. No operation may run meanwhile."""
        with self._lock:
            for block in self._free:
                self._release(block)
            self._free.clear()

    def _allocate(self, elements: int) -> Block:
        memory = self._device.allocate_state(elements, rows=1).view(-1)
        self._total_bytes += memory.nbytes
        return Block(memory, [self._device.record("memory")])

    def _remove(self, block: Block) -> None:
        # By identity: equality would compare tensors.
        self._free = [other for other in self._free if other is not block]

    def _release(self, block: Block) -> None:
        self._total_bytes -= block.memory.nbytes
        self._device.release(block.memory)
