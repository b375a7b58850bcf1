"""The time axis of a timeline, and the limits on steps of its lines and numbers of its
boxes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.profiler.trace import Trace

# Axes at least this long count in seconds, shorter ones in milliseconds.
_SECONDS_FROM_NS = 2e9


@dataclass(frozen=True)
class TimeAxis:
    """An interval of a trace and its unit."""

    origin_ns: int  # Time of the trace that is 0 on the axis.
    start_ns: int  # Start of the interval.
    end_ns: int  # End of the interval.
    # Length of the longest of all axes that are drawn to one scale; sets the unit and
    # the level of detail.
    length_ns: int

    @property
    def unit(self) -> str:
        """`s` or `ms`."""
        return "s" if self.length_ns >= _SECONDS_FROM_NS else "ms"

    @property
    def unit_ns(self) -> float:
        """Nanoseconds per unit."""
        return 1e9 if self.unit == "s" else 1e6

    def x(self, times: Ints) -> Floats:
        """Convert times of the trace (ns) to the unit of the axis."""
        return np.asarray((times - self.origin_ns) / self.unit_ns)

    def overlaps(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """Return which of some intervals (ns) have time in common with the axis."""
        return np.asarray((ends > self.start_ns) & (starts < self.end_ns))


def recorded_interval(trace: Trace, rank: int) -> tuple[int, int] | None:
    """Return (start ns, end ns) of all recorded phases, memory and link samples, copies
    and kernels; None where there are none."""
    phases, memory = trace.phases(rank), trace.memory(rank)["t_ns"]
    link, copies, kernels = trace.link(rank), trace.transfers(rank), trace.kernels(rank)
    bounds = [
        (int(starts.min()), int(ends.max()))
        for starts, ends in (
            (phases["start_ns"], phases["end_ns"]),
            (phases["gpu_start_ns"].dropna(), phases["gpu_end_ns"].dropna()),
            (memory, memory),
            (link["t_ns"] - link["window_ns"], link["t_ns"]),
            (copies["start_ns"], copies["end_ns"]),
            (kernels["start_ns"], kernels["end_ns"]),
        )
        if len(starts) and len(ends)
    ]
    return (
        (min(start for start, _ in bounds), max(end for _, end in bounds))
        if bounds
        else None
    )


class Resolution(NamedTuple):
    """Limit on the steps of a line. With more than `steps_per_slot` per slot it is
    reduced to one value per slot: memory to a band from the smallest to the largest
    size, since as a line it would be a surface that hides others; rates of the link to
    means, which keep the bytes as area."""

    slots: int  # Number of slots of the whole time axis.
    steps_per_slot: int  # Most steps per slot that are drawn exactly.

    def slots_within(self, part_ns: float, axis_ns: float) -> int:
        """Return the number of slots of a part of the axis, at least 1."""
        return max(1, round(self.slots * part_ns / axis_ns))


# A printed picture is about a thousand dots wide.
PICTURE = Resolution(slots=1000, steps_per_slot=4)
# In all of a picture's windows together.
PICTURE_BOXES = 10_000
# A screen is up to 4000 dots wide, and the reader zooms in a few times.
SCREEN_STEPS = 16_000


class BoxSampler:
    """Selects the boxes of one iteration in `stride` where there are too many, so that
    what is drawn looks like the whole.

    Beyond the limit the longest ones are drawn; `dropped` counts the others."""

    def __init__(self, iteration_starts: Ints, box_count: int, max_boxes: int) -> None:
        """Choose the stride for `box_count` boxes of the most frequent kind.
        `iteration_starts`: ns, may be empty."""
        self._iteration_starts = iteration_starts
        self._max_boxes = max_boxes
        self.stride = max(1, -(-box_count // max_boxes)) if len(iteration_starts) else 1
        self.dropped = 0

    def sample(self, boxes: pd.DataFrame) -> pd.DataFrame:
        """Return the boxes to draw, in order of time: rows with start_ns and end_ns."""
        starts, ends = (
            boxes["start_ns"].to_numpy(np.int64),
            boxes["end_ns"].to_numpy(np.int64),
        )
        iteration = np.searchsorted(self._iteration_starts, starts, side="right") - 1
        candidates = np.flatnonzero(iteration % self.stride == 0)
        by_length = np.argsort((starts - ends)[candidates], kind="stable")
        longest = candidates[by_length[: self._max_boxes]]
        self.dropped += len(candidates) - len(longest)
        return boxes.iloc[longest[np.argsort(starts[longest], kind="stable")]]
