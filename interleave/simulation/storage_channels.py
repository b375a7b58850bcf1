"""Reads and writes of storage in the event loop: each path moves one read and one write at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop

INFINITE = float("inf")


class StorageChannels:
    """The channels of all paths: of path p, 2 p reads and 2 p + 1 writes.

    Both channels of a path are slowed by one factor if together they exceed what the path moves, and all by the factor
    by which host memory slows everything.

    Attributes:
        next_end: When the next running task ends.
        traffic: Bytes/s of host memory that the running tasks need if nothing but their path slows them.
    """

    def __init__(self, limits: Sequence[float], queues: Sequence[list[int]]) -> None:
        """Initialize without any running task.

        Args:
            limits: Bytes/s of reads and writes together, by path.
            queues: Ready tasks of each channel, heaps.
        """
        count = len(queues)
        self._limits = limits
        self._queues = queues
        self._task = [-1] * count
        self._end = [INFINITE] * count
        self._left = [0.0] * count
        self._since = [0.0] * count
        self._speed = [1.0] * count
        self._demand = [0.0] * count
        self._path_share = [1.0] * len(limits)
        self.next_end = INFINITE
        self.traffic = 0.0

    def start(self, now: float, alone_s: list[float], demand: list[float], starts: list[float]) -> bool:
        """Start ready tasks on idle channels, and return whether the traffic has changed."""
        changed = False
        for channel, queue in enumerate(self._queues):
            if self._task[channel] >= 0 or (not queue and not self._demand[channel]):
                continue
            changed = True
            if not queue:
                self._demand[channel] = 0.0
                continue
            task = heappop(queue)
            self._task[channel] = task
            starts[task] = self._since[channel] = now
            self._left[channel] = alone_s[task]
            self._end[channel] = now + alone_s[task] / self._speed[channel]
            self._demand[channel] = demand[task]
        if changed:
            self._share_paths()
            self.next_end = min(self._end)
        return changed

    def _share_paths(self) -> None:
        self.traffic = 0.0
        for path, limit in enumerate(self._limits):
            both = self._demand[2 * path] + self._demand[2 * path + 1]
            self._path_share[path] = limit / both if both > limit else 1.0
            self.traffic += min(both, limit)

    def slow(self, share: float, now: float) -> None:
        """Run all tasks at a share of the speed that their paths allow."""
        for channel, task in enumerate(self._task):
            speed = share * self._path_share[channel // 2]
            if speed == self._speed[channel]:
                continue
            if task >= 0:
                self._left[channel] -= (now - self._since[channel]) * self._speed[channel]
                self._since[channel] = now
                self._end[channel] = now + self._left[channel] / speed
            self._speed[channel] = speed
        self.next_end = min(self._end)

    def finish(self, latest: float) -> list[int]:
        """Return the tasks that end until a moment, which free their channels."""
        done = [channel for channel, end in enumerate(self._end) if end <= latest]
        tasks = [self._task[channel] for channel in done]
        for channel in done:
            self._task[channel], self._end[channel] = -1, INFINITE
        self.next_end = min(self._end)
        return tasks
