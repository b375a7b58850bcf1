"""Free bytes over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats, Ints


@dataclass(frozen=True)
class FreeLine:
    """A step function that begins with its first sample. times: ns, sorted; free: bytes."""

    times: Ints
    free: Ints

    def between(self, start: int, end: int) -> tuple[Ints, Ints]:
        """(times at which each value begins, values) within [start, end); the first time is where values begin."""
        first = max(int(np.searchsorted(self.times, start, side="right")) - 1, 0)
        after = int(np.searchsorted(self.times, end, side="left"))
        times = np.maximum(self.times[first:after], start)
        # Of samples at one time the last holds.
        last = np.append(np.diff(times) > 0, True) if len(times) else np.empty(0, bool)
        return times[last], self.free[first:after][last]


def runs(times: Ints | Floats, values: Ints, end: float, least: int) -> Iterator[tuple[float, float, int]]:
    """(start, end, smallest value) of each longest interval of a step function whose values are at least `least`.

    times: where each value begins, increasing; the last one holds until `end`.
    """
    edges = np.diff(np.concatenate([[0], (values >= least).astype(np.int8), [0]]))
    bounds = np.append(times, end)
    for first, after in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        if bounds[after] > bounds[first]:
            yield bounds[first], bounds[after], int(values[first:after].min())
