"""Records details in slices of the job while it runs.

`ebbtide profile --attach` asks for them.
"""

from __future__ import annotations

from ebbtide.profiler.agent.inventories import Inventories
from ebbtide.profiler.agent.options import Options, SliceRequest, read_request
from ebbtide.profiler.agent.recorder import Recorder
from ebbtide.profiler.agent.spool import DETAIL_MARKS, DETAILS

from .detailed_capture import AllocationCapture, CopyCapture


class DetailedSlices:
    """Begins and ends detailed slices of a process at the boundaries of iterations. The
    background thread looks for requests; the threads that train only compare two
    numbers there. A process that learns late of one begins at its next iteration, and
    after the last iteration asked for it records nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._inventories = Inventories(recorder, Options())
        # Requests from before this process began to record were made of others.
        self._last_request = 0
        self._next: SliceRequest | None = None
        self._running: SliceRequest | None = None
        self._allocations: AllocationCapture | None = None
        self._copies: CopyCapture | None = None

    def look(self) -> None:
        """Read the request, if there is a new one. Called by the background thread."""
        if self._next is not None or self._running is not None:
            return
        request = read_request(self._recorder.directory)
        if request is None or request.number == self._last_request:
            return
        self._last_request = request.number
        if request.number > self._recorder.opened_ns:
            self._next = request

    def enter_iteration(self, iteration: int) -> None:
        """Begin or end a slice at the beginning of an iteration."""
        running = self._running
        if running is not None and iteration >= running.end:
            self._finish(iteration)
        request = self._next
        if request is not None and iteration >= request.first:
            self._next = None
            if iteration < request.end:
                self._begin(request, iteration)
            else:
                self._mark("missed", request, iteration)
        if self._allocations is not None:
            self._allocations.enter_iteration(iteration)
        if self._copies is not None:
            self._copies.enter_iteration(iteration)

    def _begin(self, request: SliceRequest, iteration: int) -> None:
        recorder = self._recorder
        self._running = request
        self._mark("begin", request, iteration)
        options = Options(
            first=iteration,
            last=request.end,
            allocator_iterations=request.allocator_iterations,
            transfers=request.transfers,
        )
        recorder.read_memory_every(request.poll_ms)
        if self._inventories.enter_update not in recorder.on_update:
            recorder.on_update.append(self._inventories.enter_update)
        if request.allocator_iterations:
            self._allocations = AllocationCapture(recorder, options)
            recorder.on_update.append(self._allocations.enter_update)
        if request.transfers:
            self._copies = CopyCapture(recorder, options)

    def _finish(self, iteration: int) -> None:
        """End the running slice before an iteration."""
        request, self._running = self._running, None
        allocations, self._allocations = self._allocations, None
        copies, self._copies = self._copies, None
        self._recorder.read_memory_every(None)
        # In the reverse of the order in which they began: both may have wrapped the
        # same methods of torch's profiler.
        if allocations is not None:
            self._recorder.on_update.remove(allocations.enter_update)
            allocations.stop()
        if copies is not None:
            copies.close()
        if request is not None:
            self._mark("end", request, iteration)
            self._recorder.flush()

    def _mark(self, mark: str, request: SliceRequest, iteration: int) -> None:
        self._recorder.put(
            DETAILS,
            DETAIL_MARKS.index(mark),
            int(request.transfers),
            iteration,
            request.allocator_iterations,
            w=request.number,
            x=self._recorder.last_end_ns,
        )

    def close(self) -> None:
        """End the running slice with the recording."""
        if self._running is not None:
            self._finish(self._recorder.iteration)
