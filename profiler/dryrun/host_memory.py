"""Memory of the host: large fake tensors, and what the job pins."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from ebbtide.profiler.agent.patches import Patches
from ebbtide.profiler.dryrun.clock import VirtualClock


class FakeHostMemory:
    """Follows the fake tensors of the host, which would be weights and optimizer state, and pinned memory.

    Pinned memory has the sizes of torch's allocator for it (`c10/core/CachingHostAllocator.h`): the next power of two,
    and what is released is kept for requests of the same size.

    Args:
        clock: The clock.

    Attributes:
        pageable_bytes: Bytes of fake tensors that are not pinned.
        pinned_bytes: Bytes of pinned blocks, those that are kept included.
        most_bytes: The largest sum of both so far.
        timeline: (time in ns, pageable, pinned bytes) after each change.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.pageable_bytes = self.pinned_bytes = self.most_bytes = 0
        self.timeline: list[tuple[int, int, int]] = []
        self._clock = clock
        # Address of a storage -> (its pageable bytes, its pinned block or 0, the reference whose callback releases it)
        self._live: dict[int, tuple[int, int, Any]] = {}
        self._kept: Counter[int] = Counter()
        self._closed = False

    def install(self, patches: Patches) -> None:
        """Replace the methods of tensors that pin memory, until `patches.undo()`."""

        def pin_memory(tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
            self._pin(tensor.untyped_storage())
            return tensor

        def is_pinned(tensor: Any, *_args: Any, **_kwargs: Any) -> bool:
            return bool(self._live.get(tensor.untyped_storage()._cdata, (0, 0))[1])

        patches.set(torch.Tensor, "pin_memory", pin_memory)
        patches.set(torch.Tensor, "is_pinned", is_pinned)

    def follow(self, storage: Any) -> None:
        """Count the storage of a fake tensor of the host until it is released, if it is not yet."""
        if not self._closed and storage._cdata not in self._live:
            self._add(storage, storage.nbytes(), 0)

    def close(self) -> None:
        """Count nothing any more: what happens from now on is the end of the job."""
        self._closed = True

    def notes(self) -> list[str]:
        """Return lines for people."""
        if not self.most_bytes:
            return []
        pinned = max(row[2] for row in self.timeline)
        return [
            f"host memory of this rank: at most {self.most_bytes / 1e9:,.2f} GB of large tensors on the host and of "
            f"pinned memory, {pinned / 1e9:,.2f} GB of it pinned (in powers of two, as torch pins it); Python, "
            "libraries and data come on top"
        ]

    def _pin(self, storage: Any) -> None:
        size, block, _ = self._live.get(storage._cdata, (0, 0, None))
        if block or not storage.nbytes():
            return
        block = 1 << (storage.nbytes() - 1).bit_length()
        if self._kept[block]:
            self._kept[block] -= 1
        elif not self._closed:
            self.pinned_bytes += block
        self.pageable_bytes -= size
        self._add(storage, 0, block)

    def _add(self, storage: Any, size: int, block: int) -> None:
        key = storage._cdata
        self._live[key] = size, block, weakref.ref(storage, lambda _reference: self._release(key))
        self.pageable_bytes += size
        self._note_change()

    def _release(self, key: int) -> None:
        size, block, _ = self._live.pop(key)
        self._kept[block] += 1
        if not self._closed:
            self.pageable_bytes -= size
            self._note_change()

    def _note_change(self) -> None:
        if not self._closed:
            self.most_bytes = max(self.most_bytes, self.pageable_bytes + self.pinned_bytes)
            self.timeline.append((self._clock.tick(), self.pageable_bytes, self.pinned_bytes))
