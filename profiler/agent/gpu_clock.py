"""Device times of phase boundaries, from CUDA events that are never waited for."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

# `elapsed_time` is a float32 of milliseconds: over ten seconds it still resolves a microsecond.
_ANCHOR_EVERY_NS = 10_000_000_000

# A boundary: device, its event, and when the event was recorded on the host.
Mark = tuple[int, Any, int]


class _Anchor:
    """An event on an idle stream, whose device time is therefore the host time of its recording."""

    def __init__(self, event: Any, host_ns: int) -> None:
        self.event = event
        self.host_ns = host_ns


class GpuClock:
    """Marks boundaries on the job's current stream and tells their times once the device has passed them.

    Device times are put on the host's monotonic clock through anchors: events on a stream of our own, on which
    nothing else ever waits, so that they run when they are recorded (to within about 10 us) however far the
    job's stream lags behind. Nothing here synchronizes, and nothing is recorded into a graph under capture.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: dict[int, list[Any]] = defaultdict(list)
        self._streams: dict[int, Any] = {}
        self._anchors: dict[int, _Anchor] = {}
        self._new_anchors: dict[int, _Anchor] = {}
        self._pending: deque[tuple[int, Mark, Mark]] = deque()

    def mark(self) -> Mark | None:
        """Record an event here and now; returns (device, event, host ns), or None where CUDA is not in use."""
        if not self._usable():
            return None
        device = self._cuda.current_device()
        self._anchor(device)
        event = self._event(device)
        host_ns = time.monotonic_ns()
        event.record()
        return device, event, host_ns

    def span(self, sequence: int, start: Mark | None, end: Mark | None) -> None:
        """Remember a finished phase by its two marks."""
        if start and end and start[0] == end[0]:
            self._pending.append((sequence, start, end))
        else:
            self.drop(start)
            self.drop(end)

    def drop(self, mark: Mark | None) -> None:
        """Take a mark back that will not be asked for."""
        if mark:
            self._free[mark[0]].append(mark[1])

    def finished(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, start ns, end ns) of the phases that the device has passed since the last call, in order."""
        if not self._usable():
            return
        for device, fresh in list(self._new_anchors.items()):
            if fresh.event.query():
                self._anchors[device] = self._new_anchors.pop(device)
        while self._pending:
            sequence, start, end = self._pending[0]
            device = start[0]
            anchor = self._anchors.get(device)
            if anchor is None or not (end[1].query() and start[1].query()):
                return
            self._pending.popleft()
            yield sequence, self._host_ns(anchor, start), self._host_ns(anchor, end)
            self._free[device] += (start[1], end[1])

    def drain(self, seconds: float) -> Iterator[tuple[int, int, int]]:
        """`finished`, polled for at most so long: the last phases of a job that ends."""
        deadline = time.monotonic() + seconds
        while True:
            yield from self.finished()
            if not self._pending or time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _usable(self) -> bool:
        return self._cuda.is_initialized() and not self._cuda.is_current_stream_capturing()

    def _event(self, device: int) -> Any:
        free = self._free[device]
        return free.pop() if free else self._cuda.Event(enable_timing=True)

    def _anchor(self, device: int) -> None:
        last = self._new_anchors.get(device) or self._anchors.get(device)
        if last is not None and time.monotonic_ns() - last.host_ns < _ANCHOR_EVERY_NS:
            return
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        event = self._cuda.Event(enable_timing=True)
        before = time.monotonic_ns()
        event.record(self._streams[device])
        self._new_anchors[device] = _Anchor(event, (before + time.monotonic_ns()) // 2)

    @staticmethod
    def _host_ns(anchor: _Anchor, mark: Mark) -> int:
        """The mark's device time on the host's clock.

        Nothing runs before it is launched: a mark that seems to has met an anchor that had to wait (where streams
        share a hardware queue, as under CUDA_DEVICE_MAX_CONNECTIONS=1), which is put right by it.
        """
        _, event, launched_ns = mark
        after: int = round(anchor.event.elapsed_time(event) * 1e6)
        anchor.host_ns = max(anchor.host_ns, launched_ns - after)
        return anchor.host_ns + after
