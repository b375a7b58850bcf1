"""Memory of the host that the job would hold: large tensors, and pinned memory."""

from collections import Counter

from ebbtide.features.dryrun.time.clock import VirtualClock


class HostMemory:
    """Follows the fake tensors of the host, which would be weights and optimizer state,
    and pinned memory.

    Pinned memory has the sizes of torch's allocator for it
    (`c10/core/CachingHostAllocator.h`): the next power of two, and what is released is
    kept for requests of the same size.

    Attributes:
        most_bytes, most_pinned_bytes: The largest sum of both so far, and the largest
            pinned memory.
        timeline: (time in ns, pageable, pinned bytes) after each change.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.pageable_bytes = self.pinned_bytes = self.most_bytes = (
            self.most_pinned_bytes
        ) = 0
        self.timeline: list[tuple[int, int, int]] = []
        self._clock = clock
        # Key of a storage -> (its pageable bytes, its pinned block or 0)
        self._live: dict[int, tuple[int, int]] = {}
        self._kept: Counter[int] = Counter()

    def is_pinned(self, key: int) -> bool:
        """Return whether a storage has been pinned."""
        return bool(self._live.get(key, (0, 0))[1])

    def add(self, key: int, size: int) -> bool:
        """Count a storage until it is released, and return whether it was new."""
        if self._clock.closed or key in self._live:
            return False
        self._add(key, size, 0)
        return True

    def pin(self, key: int, size: int) -> bool:
        """Move a storage to pinned memory, and return whether it was not there."""
        pageable, block = self._live.get(key, (0, 0))
        if block or not size:
            return False
        block = 1 << (size - 1).bit_length()
        if self._kept[block]:
            self._kept[block] -= 1
        elif not self._clock.closed:
            self.pinned_bytes += block
        self.pageable_bytes -= pageable
        self._add(key, 0, block)
        return True

    def free(self, key: int) -> None:
        """Release a storage."""
        size, block = self._live.pop(key)
        self._kept[block] += 1
        if not self._clock.closed:
            self.pageable_bytes -= size
            self._note_change()

    def notes(self) -> list[str]:
        """Return lines for people."""
        if not self.most_bytes:
            return []
        return [
            f"host memory of this rank: at most {self.most_bytes / 1e9:,.2f} GB of "
            "large tensors on the host and of "
            f"pinned memory, {self.most_pinned_bytes / 1e9:,.2f} GB of it pinned (in "
            "powers of two, as torch pins it); "
            "Python, libraries and data come on top"
        ]

    def _add(self, key: int, size: int, block: int) -> None:
        self._live[key] = size, block
        self.pageable_bytes += size
        self._note_change()

    def _note_change(self) -> None:
        if not self._clock.closed:
            self.most_bytes = max(
                self.most_bytes, self.pageable_bytes + self.pinned_bytes
            )
            self.most_pinned_bytes = max(self.most_pinned_bytes, self.pinned_bytes)
            self.timeline.append(
                (self._clock.tick(), self.pageable_bytes, self.pinned_bytes)
            )
