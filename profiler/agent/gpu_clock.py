"""Device times of phase boundaries, from CUDA events that nothing ever waits for."""

from __future__ import annotations

import _thread
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# `elapsed_time` is a float32 in milliseconds: over ten seconds it still resolves a
# microsecond.
_ANCHOR_EVERY_NS = 10_000_000_000


class EventMark(NamedTuple):
    """A phase boundary on a CUDA device: the event on the job's stream, and the host's
    time just before it."""

    device: int
    event: Any
    host_ns: int


class DeviceSpan(NamedTuple):
    """Device times of one phase or operation, in ns of the host's monotonic clock."""

    sequence: int
    start_ns: int
    end_ns: int


class _PendingSpan(NamedTuple):
    sequence: int
    start: EventMark
    end: EventMark


class _Anchor:
    """An event on an idle stream, to convert device times into host times.

    As the stream is idle, the event's device time is the host time of its recording.
    """

    def __init__(self, event: Any, host_ns: int) -> None:
        self.event = event
        self.host_ns = host_ns


class GpuClock:
    """Marks boundaries on the job's current stream, and returns their times.

    A time is returned once the device has passed the boundary. Anchors convert times to
    the host's monotonic clock: events on a stream of the agent, on which nothing else
    waits, so that they run when they are recorded (to within about 10 us). Nothing here
    synchronizes, and nothing is recorded into a graph under capture.

    `pending`: the spans that `finished_spans` has not returned yet."""

    def __init__(
        self, cuda: Any, make_stream: Callable[[int], Any] | None = None
    ) -> None:
        """Initialize with `torch.cuda`, and a function that makes streams.

        `make_stream` makes a stream of a device that only this clock has.
        """
        self._cuda = cuda
        self._make_stream = make_stream or cuda.Stream
        self._free_events: dict[int, list[Any]] = defaultdict(list)
        self._streams: dict[int, Any] = {}
        self._anchors: dict[int, _Anchor] = {}
        self._new_anchors: dict[int, _Anchor] = {}
        self._threads: set[int] = set()
        self.pending: deque[_PendingSpan] = deque()

    def record_mark(self) -> EventMark | None:
        """Record an event on the current stream now.

        Return None where CUDA is not in use, or fails from now on.
        """
        if not self._usable():
            return None
        device = self._cuda.current_device()
        self._threads.add(_thread.get_ident())
        try:
            self._renew_anchor(device)
            event = self._new_event(device)
            host_ns = time.monotonic_ns()
            event.record()
        except RuntimeError:
            # After an illegal access each call fails: the job learns of the access by
            # its own next call.
            return None
        return EventMark(device, event, host_ns)

    def add_span(
        self, sequence: int, start: EventMark | None, end: EventMark | None
    ) -> bool:
        """Add a finished phase or operation.

        Return False if a mark is missing or the marks are on two devices.
        """
        if start and end and start.device == end.device:
            self.pending.append(_PendingSpan(sequence, start, end))
            return True
        self.release_mark(start)
        self.release_mark(end)
        return False

    def release_mark(self, mark: EventMark | None) -> None:
        """Reuse the event of a mark whose time is not needed."""
        if mark:
            self._free_events[mark.device].append(mark.event)

    def finished_spans(self) -> Iterator[DeviceSpan]:
        """Yield the spans that the device has passed since the last call, in the order
        in which they were added.

        Nothing on a thread without marks: CUDA would make it a context on device 0, and
        a capture elsewhere would fail."""
        if _thread.get_ident() not in self._threads or not self._usable():
            return
        for device, anchor in list(self._new_anchors.items()):
            if anchor.event.query():
                self._anchors[device] = self._new_anchors.pop(device)
        while self.pending:
            sequence, start, end = self.pending[0]
            device = start.device
            usable_anchor = self._anchors.get(device)
            if usable_anchor is None or not (end.event.query() and start.event.query()):
                return
            self.pending.popleft()
            yield DeviceSpan(
                sequence,
                self._host_ns(usable_anchor, start),
                self._host_ns(usable_anchor, end),
            )
            self._free_events[device] += (start.event, end.event)

    def drain(self, seconds: float) -> Iterator[DeviceSpan]:
        """Poll `finished_spans` for at most `seconds`, and yield the last phases of a
        job that ends."""
        if _thread.get_ident() not in self._threads:
            return
        deadline = time.monotonic() + seconds
        while True:
            yield from self.finished_spans()
            if not self.pending or time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _usable(self) -> bool:
        return (
            self._cuda.is_initialized() and not self._cuda.is_current_stream_capturing()
        )

    def _new_event(self, device: int) -> Any:
        try:
            return self._free_events[device].pop()
        except IndexError:  # not asked for before: another thread may take the last one
            return self._cuda.Event(enable_timing=True)

    def _renew_anchor(self, device: int) -> None:
        last = self._new_anchors.get(device) or self._anchors.get(device)
        if last is not None and time.monotonic_ns() - last.host_ns < _ANCHOR_EVERY_NS:
            return
        if device not in self._streams:
            self._streams[device] = self._make_stream(device)
        event = self._cuda.Event(enable_timing=True)
        before_ns = time.monotonic_ns()
        event.record(self._streams[device])
        self._new_anchors[device] = _Anchor(
            event, (before_ns + time.monotonic_ns()) // 2
        )

    @staticmethod
    def _host_ns(anchor: _Anchor, mark: EventMark) -> int:
        """Convert a mark's device time to the host's clock. If a mark seems to run
        before its launch, its anchor had to wait (streams share a hardware queue, as
        under CUDA_DEVICE_MAX_CONNECTIONS=1), and is corrected by the mark."""
        since_anchor_ns: int = round(anchor.event.elapsed_time(mark.event) * 1e6)
        anchor.host_ns = max(anchor.host_ns, mark.host_ns - since_anchor_ns)
        return anchor.host_ns + since_anchor_ns
