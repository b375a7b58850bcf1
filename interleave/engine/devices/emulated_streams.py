"""Streams of the emulated device: queues of work, each with a thread that does it in order."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from ebbtide.interleave.engine.devices.device import Mark, Stream
from ebbtide.interleave.engine.errors import EngineError


class EmulatedMark:
    """A point of an emulated stream."""

    def __init__(self) -> None:
        self.time_s = math.nan
        self._passed = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Pass the mark; with an error, if work before it failed."""
        self.time_s, self._error = time.perf_counter(), error
        self._passed.set()

    @property
    def is_passed(self) -> bool:
        """Whether the stream has passed it."""
        return self._passed.is_set()

    def synchronize(self) -> None:
        """Wait until the stream has passed it. Raises EngineError if work failed."""
        self._passed.wait()
        if self._error is not None:
            raise EngineError(f"the device failed: {self._error}") from self._error


class WorkQueue:
    """Work that a thread does in order. The thread starts with the first work, and ends with this object."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_do_all, args=(self._queue,), name=name, daemon=True)
        self._end = weakref.finalize(self, self._queue.put, None)
        self._is_started = False
        self._lock = threading.Lock()

    def put(self, work: Callable[[], object]) -> None:
        """Add work, which must not raise."""
        self._queue.put(work)
        if not self._is_started:
            with self._lock:
                if not self._is_started:
                    self._thread.start()
                    self._is_started = True

    def close(self) -> None:
        """Do all work and end the thread."""
        self._end()
        if self._is_started and threading.current_thread() is not self._thread:
            self._thread.join()


def _do_all(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        # Else it would be kept alive until there is other work.
        del work


class EmulatedStreams:
    """Streams for work in host memory. After work failed, none of them does any more: a GPU ends like that too."""

    def __init__(self) -> None:
        names: tuple[Stream, ...] = ("h2d", "d2h", "gpu")
        self._queues: dict[Stream, WorkQueue] = {name: WorkQueue(f"ebbtide-emulated-{name}") for name in names}
        self._error: BaseException | None = None

    def thread_setup(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        """Issue work to a stream."""
        self._queues[stream].put(lambda: self._run(work))

    def wait(self, stream: Stream, marks: Sequence[Mark]) -> None:
        """Let a stream wait for marks."""
        for mark in marks:
            self.submit(stream, mark.synchronize)

    def record(self, stream: Stream) -> EmulatedMark:
        """Return a mark. That of the job is passed at once, since a job on the CPU issues no work."""
        mark = EmulatedMark()
        if stream in ("job", "memory"):
            mark.set()
        else:
            self._queues[stream].put(lambda: mark.set(self._error))
        return mark

    def close(self) -> None:
        """Do all work and end the threads."""
        for queue in self._queues.values():
            queue.close()

    def _run(self, work: Callable[[], object]) -> None:
        if self._error is None:
            try:
                work()
            except BaseException as error:
                # Streams that wait for the failed one fail too.
                self._error = self._error or error
