"""The interval of each trace that a figure shows, all on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.timeline.axis import TimeAxis, recorded_interval
from ebbtide.analysis.timeline.boxes import clip_boxes, has_gpu_times, phase_boxes
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

# The phases of an iteration that is a smaller share of the time axis cannot be told apart.
_MIN_ITERATION_SHARE = 1 / 90
# Time after the last phase that is shown, as a share of the time before.
_SHARE_AFTER_LAST_PHASE = 1 / 25
# Iterations [first, end); end None: until the last one.
IterationRange = tuple[int, int | None]
_ALL: IterationRange = (0, None)


@dataclass(frozen=True)
class View:
    """One rank of a trace within an interval."""

    trace: Trace
    rank: int
    iterations: IterationRange  # Iterations to show.
    axis: TimeAxis  # The interval. Its origin is its start; its length that of the longest view of the figure.

    def iteration_spans(self, on_gpu: bool) -> pd.DataFrame:
        """Return iteration, start_ns, end_ns of the finished iterations to show, by times of the GPU or the host."""
        return _select(intervals(self.trace, self.rank, on_gpu).spans, self.iterations)

    def phases(self, on_gpu: bool) -> pd.DataFrame:
        """Return the boxes of phases in the view, also of an unfinished iteration.

        Times of the GPU are used only where every phase has them.
        """
        return clip_boxes(phase_boxes(self.trace, self.rank, on_gpu and self.has_gpu_times), self.axis)

    @cached_property
    def has_room_for_phases(self) -> bool:
        """Whether iterations are long enough to draw their phases."""
        spans = self.iteration_spans(on_gpu=False)
        lengths = spans["end_ns"] - spans["start_ns"]
        return spans.empty or float(lengths.median()) >= self.axis.length_ns * _MIN_ITERATION_SHARE

    @cached_property
    def has_gpu_times(self) -> bool:
        """Whether every phase of a finished iteration has times of the GPU."""
        return has_gpu_times(self.trace, self.rank)


def make_views(traces: Sequence[Trace], iterations: IterationRange, rank: int | None) -> list[View]:
    """Choose the interval of each trace; `rank` None: the first one of each trace.

    Raises:
        TraceError: A trace has no such rank or no such iterations, or no data.
    """
    ranks = [(trace, _rank(trace, rank)) for trace in traces]
    bounds = [_bounds(trace, number, iterations) for trace, number in ranks]
    length = max(max(end - start for start, end in bounds), 1)
    return [
        View(trace, number, iterations, TimeAxis(start, start, end, length))
        for (trace, number), (start, end) in zip(ranks, bounds, strict=True)
    ]


def _rank(trace: Trace, rank: int | None) -> int:
    if rank is not None:
        trace.rank(rank)
        return rank
    if not trace.ranks:
        raise TraceError(f"{trace.path} has no ranks: nothing was recorded in it")
    return trace.ranks[0]


def _bounds(trace: Trace, rank: int, iterations: IterationRange) -> tuple[int, int]:
    """Return (start ns, end ns) of the iterations; of all of them, with a little of what followed.

    Without iterations it is everything that was recorded.
    """
    if iterations != _ALL:
        return _iteration_bounds(trace, rank, iterations)
    recorded = recorded_interval(trace, rank)
    if recorded is None:
        raise TraceError(f"{trace.path} has no phases, memory samples, link data or kernels: nothing to draw")
    phases, spans = trace.phases(rank), intervals(trace, rank, device_times=False).spans
    if spans.empty:
        return recorded
    start = int(pd.concat([phases["start_ns"], spans["start_ns"]]).min())
    end = int(pd.concat([phases["end_ns"], phases["gpu_end_ns"].dropna()]).max())
    return start, min(end + int((end - start) * _SHARE_AFTER_LAST_PHASE), recorded[1])


def _iteration_bounds(trace: Trace, rank: int, iterations: IterationRange) -> tuple[int, int]:
    spans = intervals(trace, rank, device_times=False).spans
    selected = _select(spans, iterations)
    if selected.empty:
        available = f"{spans['iteration'].min()} to {spans['iteration'].max()}" if len(spans) else "none"
        first, end = iterations
        raise TraceError(f"{trace.path} has no iterations {first}:{'' if end is None else end} (it has {available})")
    # The GPU ends an iteration later than the host.
    gpu_end = _select(intervals(trace, rank).spans, iterations)["end_ns"].max()
    return int(selected["start_ns"].min()), max(int(selected["end_ns"].max()), int(gpu_end))


def _select(spans: pd.DataFrame, iterations: IterationRange) -> pd.DataFrame:
    first, end = iterations
    return spans[(spans["iteration"] >= first) & (spans["iteration"] < (np.inf if end is None else end))]
