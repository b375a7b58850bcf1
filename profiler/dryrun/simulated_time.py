"""Times of a host and of the queues of its GPU, under one set of assumptions."""

from __future__ import annotations

from collections import deque

from ebbtide.profiler.dryrun.time_priors import MAX_QUEUED


class SimulatedTime:
    """A host that launches work asynchronously, and a GPU that runs each stream in order.

    Attributes:
        host_ns: The time that the host has reached.
    """

    def __init__(self) -> None:
        self.host_ns = 0
        self._streams: dict[int, int] = {}
        self._engines: dict[str, int] = {}
        self._queued: deque[int] = deque(maxlen=MAX_QUEUED)

    def launch(self, stream: int, latency_ns: int, duration_ns: int, engine: str | None = None) -> tuple[int, int]:
        """Append work to a stream, and return its start and end.

        Args:
            stream: The stream.
            latency_ns: From now to the earliest start.
            duration_ns: The length of the work.
            engine: The resource that does one piece of work at a time, of all streams; None: one of the stream's own.
        """
        if len(self._queued) == MAX_QUEUED:
            self.host_ns = max(self.host_ns, self._queued[0])
        start = max(self.host_ns + latency_ns, self._streams.get(stream, 0))
        if engine is not None:
            start = max(start, self._engines.get(engine, 0))
        end = start + duration_ns
        self._streams[stream] = end
        if engine is not None:
            self._engines[engine] = end
        self._queued.append(end)
        return start, end

    def reached_ns(self, stream: int) -> int:
        """Return when the GPU passes what is recorded on a stream now, as an event."""
        return max(self.host_ns, self._streams.get(stream, 0))

    def wait(self, stream: int, until_ns: int) -> None:
        """Make a stream wait."""
        self._streams[stream] = max(self._streams.get(stream, 0), until_ns)

    def synchronize(self, stream: int | None = None) -> None:
        """Make the host wait for a stream, or for all of them."""
        ends = self._streams.values() if stream is None else (self._streams.get(stream, 0),)
        self.host_ns = max(self.host_ns, *ends, 0)
