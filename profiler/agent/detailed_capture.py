"""Records that are too dear for a whole job, taken over some of its iterations: allocator history and copies."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from .memory_reader import REQUESTED, RESERVED
from .options import Options
from .recorder import Recorder
from .spool import MEMORY

# The first iterations compile, tune and make optimizer state: the history of a later one says more.
_SETTLED = 2
_SLICE_SECONDS = 2.0
_MAX_ENTRIES = 2_000_000


def attach_slices(recorder: Recorder, torch: Any, options: Options) -> None:
    """Have `recorder` take what `options` ask for, where the job turns out to use CUDA."""
    if options.allocator_iterations:
        history = AllocatorHistory(recorder, torch, options)
        recorder.on_iteration.append(history.at_iteration)
        recorder.on_close.append(history.stop)
    if options.transfers:
        copies = Copies(recorder, torch, options)
        recorder.on_iteration.append(copies.at_iteration)
        recorder.on_close.append(copies.close)


class AllocatorHistory:
    """Every allocation and release of torch's CUDA allocator over some iterations, as exact memory lines."""

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
        self._first = max(options.first, _SETTLED)
        self._last = self._first + options.allocator_iterations
        self._running = False

    def at_iteration(self, following: int) -> None:
        if following == self._first and not self._running and self._torch.cuda.is_initialized():
            self._start()
        elif following >= self._last:
            self.stop()

    def _start(self) -> None:
        if self._torch._C._cuda_isHistoryEnabled():
            self._recorder.facts.note("no allocator history: the job records one of its own")
            return
        # No stacks: with them a snapshot takes seconds.
        self._torch.cuda.memory._record_memory_history(
            enabled="all", context=None, stacks="python", max_entries=_MAX_ENTRIES
        )
        self._running = True

    def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        device = self._torch.cuda.current_device()
        trace = self._torch.cuda.memory._snapshot()["device_traces"][device]
        stats = self._torch._C._cuda_memoryStats(device)
        now = [stats[f"{count}_bytes"]["all"]["current"] for count in ("requested", "reserved")]
        self._torch.cuda.memory._record_memory_history(enabled=None)
        if len(trace) >= _MAX_ENTRIES:
            self._recorder.facts.note(f"the allocator history holds only its last {_MAX_ENTRIES} events")
        to_monotonic = time.monotonic_ns() - time.time_ns()
        for pool, time_ns, size in allocator_lines(trace, *now):
            self._recorder.put(MEMORY, pool, device, x=time_ns + to_monotonic, y=size)


def allocator_lines(trace: list[Any], requested: int, reserved: int) -> Any:
    """(pool, wall ns, bytes) after each event of an allocator trace that ended at the given sizes.

    A trace tells the bytes that were asked for, not the rounded blocks that `allocated` counts; they are in use
    until their release is asked for.
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


class Copies:
    """Each copy between host and device, from CUPTI by way of torch's profiler.

    The profiler runs in slices of a few seconds, cut at iterations; each is left as a Chrome trace for the
    collector to read. CUPTI serves one subscriber: where the job profiles itself, this gives way and says so.
    """

    def __init__(self, recorder: Recorder, torch: Any, options: Options) -> None:
        self._recorder = recorder
        self._torch = torch
        self._options = options
        self._profiler: Any = None
        self._began = 0.0
        self._slices = 0
        self._given_up = False
        # Either is where a profiler begins, by how it was started.
        self._profile = torch.autograd.profiler.profile
        begins = {name: self._profile.__dict__.get(name) for name in ("_prepare_trace", "__enter__")}
        self._originals = {name: begin for name, begin in begins.items() if begin is not None}
        for name, begin in self._originals.items():
            setattr(self._profile, name, self._giving_way(begin))

    def at_iteration(self, following: int) -> None:
        last = self._options.last
        if self._given_up or following < self._options.first or not self._torch.cuda.is_initialized():
            return
        if last is not None and following >= last:
            self.stop()
        elif self._profiler is None:
            self._start()
        elif time.monotonic() - self._began > _SLICE_SECONDS:
            self.stop()
            self._start()

    def _start(self) -> None:
        if self._torch._C._autograd._profiler_enabled():
            self._give_up()
            return
        activity = self._torch.profiler.ProfilerActivity.CUDA
        self._profiler = self._torch.profiler.profile(activities=[activity])
        self._began = time.monotonic()
        self._profiler.start()

    def stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._slices += 1
        path = self._recorder.beside(f"copies-{self._slices}.json")
        profiler.export_chrome_trace(path + ".new")
        os.replace(path + ".new", path)

    def close(self) -> None:
        self.stop()
        for name, begin in self._originals.items():
            setattr(self._profile, name, begin)

    def _give_up(self) -> None:
        self._given_up = True
        self._recorder.facts.note("copies were not recorded to the end: the job uses a profiler of its own")

    def _giving_way(self, original: Any) -> Any:
        @functools.wraps(original)
        def begin(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self._profiler
            if ours is not None and getattr(ours, "profiler", None) not in (None, profiler):
                self.stop()
                self._give_up()
            return original(profiler, *args, **kwargs)

        return begin
