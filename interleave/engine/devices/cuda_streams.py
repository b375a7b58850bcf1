"""Streams of a GPU, and marks whose times are on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ebbtide.interleave.engine.devices.device import Mark, Stream


class CudaMark:
    """An event that was recorded on a stream.

    Args:
        event: The event.
        clock: The clock for its time.
    """

    def __init__(self, event: torch.cuda.Event, clock: CudaClock) -> None:
        self.event = event
        self._clock = clock

    @property
    def is_passed(self) -> bool:
        """Whether the stream has passed it."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait, without the GIL, until the stream has passed it."""
        self.event.synchronize()

    @property
    def time_s(self) -> float:
        """When the stream passed it, on the clock of time.perf_counter."""
        return self._clock.time_s(self.event)


class CudaClock:
    """Times of events on the host's clock: they are counted from an event whose time on the host is known.

    Args:
        stream: A stream without other work, which passes an event as soon as it is recorded.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._begin = torch.cuda.Event(enable_timing=True, blocking=True)
        self._begin.record(stream)
        self._begin.synchronize()
        self._begin_s = time.perf_counter()

    def time_s(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that was passed, in seconds."""
        return self._begin_s + float(self._begin.elapsed_time(event)) / 1e3


class CudaStreams:
    """The streams for copies and updates of one GPU, and those of the job. Marks order them.

    Args:
        device: The GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            names: tuple[Stream, ...] = ("h2d", "d2h", "gpu")
            self._streams = {name: torch.cuda.Stream() for name in names}
            self._clock_stream = torch.cuda.Stream()
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
        return CudaMark(event, self._clock)

    def begin_iteration(self) -> None:
        """Allocate memory in the order of the calling thread's current stream, from now on, and set the clock again."""
        with torch.cuda.device(self._device):
            self._streams["memory"] = torch.cuda.current_stream()
            self._clock = CudaClock(self._clock_stream)
