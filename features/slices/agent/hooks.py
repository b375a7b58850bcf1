"""Plugs the captures of details into the agent."""

from __future__ import annotations

from typing import Callable

from ebbtide.profiler.agent.recorder import Recorder

from .detailed_capture import AllocationCapture, CopyCapture
from .on_demand import DetailedSlices


def install(recorder: Recorder) -> Callable[[], None]:
    """Capture what the options ask for; return a function that ends that.

    Copies are CUDA's.
    """
    options = recorder.options
    ends: list[Callable[[], None]] = []
    if options.memory and options.allocator_iterations:
        allocations = AllocationCapture(recorder, options)
        recorder.on_iteration.append(allocations.enter_iteration)
        recorder.on_update.append(allocations.enter_update)
        ends.append(allocations.stop)
    if options.transfers:
        copies = CopyCapture(recorder, options)
        recorder.on_iteration.append(copies.enter_iteration)
        ends.append(copies.close)
    if options.on_demand:
        _look_for_requests(recorder)
        recorder.on_restart.append(lambda: _look_for_requests(recorder))

    def end() -> None:
        for end_capture in ends:
            end_capture()

    return end


def _look_for_requests(recorder: Recorder) -> None:
    slices = DetailedSlices(recorder)
    recorder.on_flush.append(slices.look)
    recorder.on_iteration.append(slices.enter_iteration)
    recorder.on_close.append(slices.close)
