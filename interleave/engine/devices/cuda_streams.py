"""Streams of a GPU, and marks whose times are on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.interleave.engine.devices.capture_mode import relaxed_captures
from ebbtide.interleave.engine.devices.device import Mark, Stream


@contextmanager
def thread_setup(device: torch.device) -> Iterator[None]:
    """Return a context in which the calling thread may use a GPU: see `Streams.thread_setup`."""
    with torch.cuda.device(device), relaxed_captures():
        yield


class CudaAnchor:
    """A passed event, and when on the clock of time.perf_counter. Times of later events are counted from it."""

    def __init__(self, event: torch.cuda.Event, time_s: float) -> None:
        self._event = event
        self._time_s = time_s

    def time_s(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that was passed, in seconds."""
        elapsed_s = float(self._event.elapsed_time(event)) / 1e3
        # The clocks of host and device drift apart, but the event is over now.
        self._time_s = min(self._time_s, time.perf_counter() - elapsed_s)
        return self._time_s + elapsed_s


class CudaMark:
    """An event that was recorded on a stream of a GPU, after an anchor."""

    def __init__(self, device: torch.device, event: torch.cuda.Event, anchor: CudaAnchor) -> None:
        self.event = event
        self._device = device
        self._anchor = anchor

    @property
    def is_passed(self) -> bool:
        """Whether the stream has passed it."""
        with thread_setup(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait, without the GIL, until the stream has passed it."""
        with thread_setup(self._device):
            self.event.synchronize()

    @property
    def time_s(self) -> float:
        """When the stream passed it, on the clock of time.perf_counter."""
        return self._anchor.time_s(self.event)


class CudaStreams:
    """The streams for copies and updates of one GPU (with its index), and those of the job. Marks order them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with thread_setup(device):
            names: tuple[Stream, ...] = ("h2d", "d2h", "gpu")
            self._streams = {name: torch.cuda.Stream() for name in names}
            # Without other work: it passes an event as soon as it is recorded, unless all streams share one queue
            # (CUDA_DEVICE_MAX_CONNECTIONS=1).
            self._clock_stream = torch.cuda.Stream()
            event, _ = self._next_anchor = self._record_anchor()
            event.synchronize()
            self._anchor = CudaAnchor(event, time.perf_counter())
        self.begin_iteration()

    def stream(self, name: Stream) -> torch.cuda.Stream:
        """Return a stream of torch; `job` is the current one of the calling thread."""
        return torch.cuda.current_stream(self._device) if name == "job" else self._streams[name]

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        """Let a stream wait for marks."""
        for mark in marks:
            assert isinstance(mark, CudaMark)
            self.stream(stream).wait_event(mark.event)

    def record(self, stream: Stream) -> CudaMark:
        """Return a mark behind everything that was issued to a stream."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(self.stream(stream))
        return CudaMark(self._device, event, self._anchor)

    def begin_iteration(self) -> None:
        """Allocate memory in the order of the calling thread's current stream, from now on, and set the clock again.

        An anchor is used when it was passed. Nothing waits for it: work of the job may be before it."""
        with thread_setup(self._device):
            self._streams["memory"] = torch.cuda.current_stream()
            event, recorded_s = self._next_anchor
            if event.query():
                self._anchor = CudaAnchor(event, max(recorded_s, self._anchor.time_s(event)))
                self._next_anchor = self._record_anchor()

    def _record_anchor(self) -> tuple[torch.cuda.Event, float]:
        """Return an event on the stream of the clock, and the time before it."""
        recorded_s = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._clock_stream)
        return event, recorded_s
