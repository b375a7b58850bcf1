"""Limits on the detail of a timeline: steps of lines and numbers of boxes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.step_functions import Ints


class Resolution(NamedTuple):
    """Limit on the steps of a line.

    A line with more than `steps_per_slot` steps per slot is reduced to one value per slot: memory to a band from the
    smallest to the largest size, since as a line it would be a surface that hides others; rates of the link to means,
    which keep the bytes as area.
    """

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
    """Selects the boxes to draw where there are too many: those of one iteration in `stride`.

    What is drawn then looks like the whole. Beyond the limit, the longest boxes are drawn.

    Attributes:
        stride: One iteration in `stride` is drawn.
        dropped: Number of boxes in drawn iterations that were left out as the shortest ones.
    """

    def __init__(self, iteration_starts: Ints, box_count: int, max_boxes: int) -> None:
        """Choose the stride.

        Args:
            iteration_starts: Start of each iteration, ns; empty where there are none.
            box_count: Number of boxes of the most frequent kind.
            max_boxes: Most boxes of each kind to draw.
        """
        self._iteration_starts = iteration_starts
        self._max_boxes = max_boxes
        self.stride = max(1, -(-box_count // max_boxes)) if len(iteration_starts) else 1
        self.dropped = 0

    def sample(self, boxes: pd.DataFrame) -> pd.DataFrame:
        """Return the boxes to draw, in order of time: rows with start_ns and end_ns."""
        starts, ends = boxes["start_ns"].to_numpy(np.int64), boxes["end_ns"].to_numpy(np.int64)
        iteration = np.searchsorted(self._iteration_starts, starts, side="right") - 1
        candidates = np.flatnonzero(iteration % self.stride == 0)
        by_length = np.argsort((starts - ends)[candidates], kind="stable")
        longest = candidates[by_length[: self._max_boxes]]
        self.dropped += len(candidates) - len(longest)
        return boxes.iloc[longest[np.argsort(starts[longest], kind="stable")]]
