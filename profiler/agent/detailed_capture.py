"""Captures that are too expensive for a whole job, made over some of its iterations: allocations, copies, kernels."""

from __future__ import annotations

import os
import time
from typing import Any

from .allocation_capture import AllocationCapture
from .options import Options
from .profiler_guard import GuardedProfiler
from .recorder import Recorder

# A slice is at most so long, and about as large (20,000 events); the first one is a single iteration.
_SLICE_NS, _SLICE_BYTES = 2_000_000_000, 5_000_000
# Slices hold the job up for one part in so many of its time, and for so long in advance: a short job has several.
# After so long the pauses grow as the job goes on.
_HELD_SHARE, _ADVANCE_NS, _UNPAUSED_NS = 100, 1_000_000_000, 10_000_000_000


def attach_captures(recorder: Recorder, torch: Any, options: Options) -> None:
    """Add the captures that `options` ask for to `recorder`. Copies are those of CUDA."""
    if options.memory and options.allocator_iterations:
        capture = AllocationCapture(recorder, torch, options)
        recorder.on_iteration.append(capture.enter_iteration)
        recorder.on_update.append(capture.enter_update)
        recorder.on_close.append(capture.stop)
    if options.transfers:
        copies = CopyCapture(recorder, torch, options)
        recorder.on_iteration.append(copies.enter_iteration)
        recorder.on_close.append(copies.close)


class CopyCapture:
    """Records copies, kernels and the calls that launch them, from CUPTI through torch's profiler.

    The profiler runs in slices of whole iterations, each written as a Chrome trace that is named for its span. That
    holds the job up, longer for more events: slices are short, with pauses unless `last` is set. CUPTI serves one
    subscriber: if the job profiles itself, this capture ends with a note.
    """

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
        self._options = options
        self._profiler = GuardedProfiler(torch, self._yield_to_job)
        self._first_ns = self._begin_ns = self._stop_ns = self._length_ns = 0
        self._held_ns = self._resume_ns = 0
        self._given_up = False

    def enter_iteration(self, iteration: int) -> None:
        """Stop or start the profiler at the beginning of an iteration."""
        if self._profiler.running is not None and not self._profiler.on_its_thread:
            return  # another thread trains as well; only the one that began the slice can end it
        now_ns, last = time.monotonic_ns(), self._options.last
        outside = iteration < self._options.first or (last is not None and iteration >= last)
        if outside or now_ns >= self._stop_ns:
            self.stop()
        if self._profiler.running or outside or self._given_up or now_ns < self._resume_ns:
            return
        if self._torch.cuda.is_initialized():
            self._start()

    def _start(self) -> None:
        begin_ns = time.monotonic_ns()
        if not self._profiler.start(activities=[self._torch.profiler.ProfilerActivity.CUDA]):
            self._give_up("the job uses a profiler of its own")
            return
        self._begin_ns = begin_ns
        self._stop_ns, self._first_ns = begin_ns + self._length_ns, self._first_ns or begin_ns

    def stop(self) -> None:
        """End the slice and write it, if one runs."""
        if self._profiler.running is None or self._given_up:
            return
        if not self._profiler.on_its_thread:
            self._give_up("the recording ended on another thread")
            return
        stop_ns = time.monotonic_ns()
        profiler = self._profiler.stop()
        # The profiler waits for the device, which runs behind the host: all that it ran until now is in the slice.
        end_ns = time.monotonic_ns()
        path = self._recorder.files.path(f"copies-{self._begin_ns}-{end_ns}.json")
        profiler.export_chrome_trace(path + ".new")
        os.replace(path + ".new", path)
        self._length_ns = min(_SLICE_NS, (stop_ns - self._begin_ns) * _SLICE_BYTES // os.path.getsize(path))
        self._held_ns += time.monotonic_ns() - stop_ns
        if self._options.last is None:
            pause_ns = max(0, stop_ns - self._first_ns - _UNPAUSED_NS)
            self._resume_ns = max(stop_ns + pause_ns, self._first_ns + _HELD_SHARE * (self._held_ns - _ADVANCE_NS))

    def close(self) -> None:
        """End the slice, and restore torch's profiler."""
        self.stop()
        self._profiler.restore()

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._recorder.files.job_info.note(f"copies were not recorded to the end: {reason}")

    def _yield_to_job(self) -> None:
        """End the capture before the job begins a profiler of its own."""
        self.stop()
        self._give_up("the job uses a profiler of its own")
