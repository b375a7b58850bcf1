"""Free bytes over time, and the intervals in which they reach a threshold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats, Ints


@dataclass(frozen=True)
class FreeTimeline:
    """Free memory as a step function, which has no value before its first sample."""

    times: Ints  # Times of the samples, ns, sorted.
    free: Ints  # Free bytes from each time until the next one.

    def between(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Return (times at which each value begins, values) of the timeline in [start, end). The first time is `start`,
        or the first sample where that is later. Of several samples at one time the last one counts."""
        first = max(int(np.searchsorted(self.times, start, side="right")) - 1, 0)
        after = int(np.searchsorted(self.times, end, side="left"))
        times = np.maximum(self.times[first:after], start)
        last = np.append(np.diff(times) > 0, True) if len(times) else np.empty(0, bool)
        return times[last], self.free[first:after][last]


def intervals_at_least(
    times: Ints | Floats, values: Ints, end: float, threshold: int
) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, smallest value) of each maximal interval in which a step function reaches the threshold.

    Args:
        times: Where each value begins, increasing.
        values: Values; the last one holds until `end`.
        end: End of the step function, in the unit of `times`.
    """
    edges = np.diff(np.concatenate([[0], (values >= threshold).astype(np.int8), [0]]))
    bounds = np.append(times, end)
    for first, after in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        if bounds[after] > bounds[first]:
            yield bounds[first], bounds[after], int(values[first:after].min())
