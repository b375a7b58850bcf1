"""Where the windows of free memory lie on a trace's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.devices import capacity_bytes, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.recurring_windows import by_place
from ebbtide.analysis.metrics.windows import Window, find_windows, pieces
from ebbtide.analysis.plot.views import View
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.analysis.timeseries.thresholds import FreeLine


@dataclass(frozen=True)
class Boxes:
    """starts, ends: ns. free: the least free bytes in each. idle: per direction the share of each in which nothing
    moved, NaN where not known."""

    starts: Ints
    ends: Ints
    free: Ints
    idle: dict[str, Floats]

    def longest(self, most: int) -> Boxes:
        return self.take(np.sort(np.argsort(self.starts - self.ends, kind="stable")[:most]))

    def take(self, kept: Ints) -> Boxes:
        idle = {direction: shares[kept] for direction, shares in self.idle.items()}
        return Boxes(self.starts[kept], self.ends[kept], self.free[kept], idle)


def free_boxes(view: View, min_bytes: int) -> Boxes:
    """The windows of the view. Raises TraceError where the trace has no memory line or no capacity."""
    windows = find_windows(view.trace, min_bytes, [view.rank]).windows
    origins = intervals(view.trace, view.rank, device_times=False).spans.set_index("iteration")["start_ns"]
    # Without phases times count from the first sample.
    first = memory_line(view.trace, view.rank, main_pool(view.trace) or "")[0][:1]
    begins = [int(first[0]) if w.iteration is None else int(origins[w.iteration]) for w in windows]
    return _shown(
        view,
        _ns([begin + round(w.start_ms * 1e6) for begin, w in zip(begins, windows, strict=True)]),
        _ns([begin + round(w.end_ms * 1e6) for begin, w in zip(begins, windows, strict=True)]),
        _ns([w.free_bytes for w in windows]),
        {direction: _shares(windows, direction) for direction in DIRECTIONS},
    )


def guaranteed_boxes(view: View, min_bytes: int) -> Boxes:
    """What every iteration of the trace has free, at its place in each iteration of the view."""
    times, used = memory_line(view.trace, view.rank, main_pool(view.trace) or "")
    line = FreeLine(times, (capacity_bytes(view.trace, view.rank) or 0) - used)
    starts, ends, free = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for place in by_place(pieces(view.trace, view.rank, line)):
        lengths = place.ends - place.starts
        for begins, stops, least in place.windows(line, min_bytes):
            starts.append(place.starts + np.rint(lengths * begins).astype(np.int64))
            ends.append(place.starts + np.rint(lengths * stops).astype(np.int64))
            free.append(np.full(len(lengths), least, np.int64))
    return _shown(view, np.concatenate(starts), np.concatenate(ends), np.concatenate(free), {})


def _shown(view: View, starts: Ints, ends: Ints, free: Ints, idle: dict[str, Floats]) -> Boxes:
    """The parts of boxes that lie in the view."""
    boxes = Boxes(starts.clip(view.start, view.end), ends.clip(view.start, view.end), free, idle)
    return boxes.take(np.flatnonzero(view.inside(starts, ends)))


def _ns(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _shares(windows: Sequence[Window], direction: str) -> Floats:
    shares = [w.h2d_idle_share if direction == "h2d" else w.d2h_idle_share for w in windows]
    return np.array([np.nan if share is None else share for share in shares], np.float64)
