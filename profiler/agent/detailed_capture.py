"""Captures that are too expensive for a whole job, made over some of its iterations: allocator history and copies."""

from __future__ import annotations

import _thread
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

from .memory_reader import REQUESTED, RESERVED, Reading
from .options import Options
from .recorder import Recorder
from .spool import MEMORY

# The first iterations compile, tune and create optimizer state: the history of a later one is more typical.
_SETTLED_ITERATION = 2
_MAX_ENTRIES = 2_000_000
# A slice of copies is at most so long, and about as large (20,000 events); the first one is a single iteration.
_SLICE_NS, _SLICE_BYTES = 2_000_000_000, 5_000_000
# After so long the pauses grow as the job goes on. Slices hold it up for one part in so many of its time.
_UNPAUSED_NS, _HELD_SHARE = 10_000_000_000, 100


def attach_captures(recorder: Recorder, torch: Any, options: Options) -> None:
    """Add the captures that `options` ask for to `recorder`. They do nothing in a job that does not use CUDA."""
    if options.memory and options.allocator_iterations:
        history = AllocatorHistory(recorder, torch, options)
        recorder.on_iteration.append(history.enter_iteration)
        recorder.on_close.append(history.stop)
    if options.transfers:
        copies = CopyCapture(recorder, torch, options)
        recorder.on_iteration.append(copies.enter_iteration)
        recorder.on_close.append(copies.close)


class AllocatorHistory:
    """Records every allocation and release of torch's CUDA allocator over some iterations, as exact memory samples."""

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
        self._first = max(options.first, _SETTLED_ITERATION)
        self._last = self._first + options.allocator_iterations
        self._running = False

    def enter_iteration(self, iteration: int) -> None:
        """Start or stop the history at the beginning of an iteration."""
        if iteration == self._first and not self._running and self._torch.cuda.is_initialized():
            self._start()
        elif iteration >= self._last:
            self.stop()

    def _start(self) -> None:
        if self._torch._C._cuda_isHistoryEnabled():
            self._recorder.files.job_info.note("no allocator history: the job records one of its own")
            return
        # Without stacks: with them a snapshot takes seconds.
        self._torch.cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=_MAX_ENTRIES
        )
        self._running = True

    def stop(self) -> None:
        """Stop the history and put it into the spool, if it runs."""
        if not self._running:
            return
        self._running = False
        device = self._torch.cuda.current_device()
        trace = self._torch.cuda.memory._snapshot()["device_traces"][device]
        stats = self._torch._C._cuda_memoryStats(device)
        final_bytes = [stats[f"{count}_bytes"]["all"]["current"] for count in ("requested", "reserved")]
        self._torch.cuda.memory._record_memory_history(enabled=None)
        if len(trace) >= _MAX_ENTRIES:
            self._recorder.files.job_info.note(f"the allocator history holds only its last {_MAX_ENTRIES} events")
        wall_to_monotonic_ns = time.monotonic_ns() - time.time_ns()
        for pool, wall_ns, size in allocator_samples(trace, *final_bytes):
            self._recorder.put(MEMORY, pool, device, x=wall_ns + wall_to_monotonic_ns, y=size)


def allocator_samples(trace: list[Any], requested: int, reserved: int) -> Iterator[Reading]:
    """Yield (pool, wall time in ns, bytes in use) after each event of an allocator trace, a snapshot's `device_traces`.

    A trace has the bytes that the job requested, not the rounded blocks that `allocated` counts. They are in use until
    the job requests their release. `requested` and `reserved` are the bytes at the end of the trace.
    """
    change = {
        "alloc": (REQUESTED, 1),
        "free_requested": (REQUESTED, -1),
        "segment_alloc": (RESERVED, 1),
        "segment_map": (RESERVED, 1),
        "segment_free": (RESERVED, -1),
        "segment_unmap": (RESERVED, -1),
    }
    events = [(*change[e["action"]], e["time_us"] * 1000, e["size"]) for e in trace if e["action"] in change]
    size = {REQUESTED: requested, RESERVED: reserved}
    for pool, sign, _, amount in events:
        size[pool] -= sign * amount
    for pool, sign, wall_ns, amount in events:
        size[pool] += sign * amount
        yield pool, wall_ns, size[pool]


class CopyCapture:
    """Records copies between host and device, from CUPTI through torch's profiler.

    The profiler runs in slices of whole iterations, each written as a Chrome trace that is named for its span. That
    holds the job up, longer for more events: slices are short, with pauses unless `last` is set. CUPTI serves one
    subscriber: if the job profiles itself, this capture ends with a note.
    """

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
        self._options = options
        self._profiler: Any = None
        self._thread = self._first_ns = self._begin_ns = self._stop_ns = self._length_ns = 0
        self._held_ns = self._resume_ns = 0
        self._given_up = False
        # A profiler begins in one or the other of these.
        self._profile = torch.autograd.profiler.profile
        methods = {name: self._profile.__dict__.get(name) for name in ("_prepare_trace", "__enter__")}
        self._originals = {name: method for name, method in methods.items() if method is not None}
        for name, method in self._originals.items():
            setattr(self._profile, name, self._yield_to_job(method))

    def enter_iteration(self, iteration: int) -> None:
        """Stop or start the profiler at the beginning of an iteration."""
        now_ns, last = time.monotonic_ns(), self._options.last
        outside = iteration < self._options.first or (last is not None and iteration >= last)
        if outside or now_ns >= self._stop_ns:
            self.stop()
        if self._profiler or outside or self._given_up or now_ns < self._resume_ns:
            return
        if self._torch.cuda.is_initialized():
            self._start()

    def _start(self) -> None:
        if self._torch._C._autograd._profiler_enabled():
            self._give_up("the job uses a profiler of its own")
            return
        self._thread, cuda = _thread.get_ident(), self._torch.profiler.ProfilerActivity.CUDA
        self._begin_ns = time.monotonic_ns()
        self._stop_ns, self._first_ns = self._begin_ns + self._length_ns, self._first_ns or self._begin_ns
        try:  # From torch 2.13 on a profiler can record copies only.
            self._profiler = self._torch.profiler.profile(activities=[{cuda: ["GPU_MEMCPY"]}])
            self._profiler.start()
        except (TypeError, RuntimeError):
            self._profiler = self._torch.profiler.profile(activities=[cuda])
            self._profiler.start()

    def stop(self) -> None:
        """End the slice and write it, if one runs."""
        if self._profiler is None or self._given_up:
            return
        if self._thread != _thread.get_ident():  # A thread can only stop its own profiler: torch crashes.
            self._give_up("the recording ended on another thread")
            return
        profiler, self._profiler, end_ns = self._profiler, None, time.monotonic_ns()
        profiler.stop()
        path = self._recorder.files.path(f"copies-{self._begin_ns}-{end_ns}.json")
        profiler.export_chrome_trace(path + ".new")
        os.replace(path + ".new", path)
        self._length_ns = min(_SLICE_NS, (end_ns - self._begin_ns) * _SLICE_BYTES // os.path.getsize(path))
        self._held_ns += time.monotonic_ns() - end_ns
        if self._options.last is None:
            pause_ns = max(0, end_ns - self._first_ns - _UNPAUSED_NS)
            self._resume_ns = max(end_ns + pause_ns, self._first_ns + _HELD_SHARE * self._held_ns)

    def close(self) -> None:
        """End the slice, and restore torch's profiler."""
        self.stop()
        for name, method in self._originals.items():
            setattr(self._profile, name, method)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._recorder.files.job_info.note(f"copies were not recorded to the end: {reason}")

    def _yield_to_job(self, original: Any) -> Any:
        """Wrap a method in which a profiler begins: one of the job's ends this capture."""

        @functools.wraps(original)
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self._profiler
            if ours is not None and getattr(ours, "profiler", None) not in (None, profiler):
                self.stop()
                self._give_up("the job uses a profiler of its own")
            return original(profiler, *args, **kwargs)

        return begin
