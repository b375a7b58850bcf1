"""Times a call that is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.interleave.calibrate.ranks import Ranks

_MIN_RUNS = 3


@dataclass(frozen=True)
class Timing:
    """The duration of a repeated call.

    Attributes:
        seconds: Median of one run.
        runs: Number of runs.
        spread: Distance from the 10th to the 90th percentile, divided by the median.
    """

    seconds: float
    runs: int
    spread: float

    @classmethod
    def from_runs(cls, seconds: list[float]) -> Timing:
        """Summarize the durations of all runs in seconds."""
        short, middle, long = map(float, np.percentile(seconds, [10, 50, 90]))
        return cls(middle, len(seconds), (long - short) / middle)


def measure_time(run: Callable[[], object], window_s: float, ranks: Ranks) -> Timing:
    """Call `run` once unmeasured, wait for the other ranks, then call it for `window_s` seconds, at least three times.

    `run` must return only when its work has ended.
    """
    return measure_times([run], window_s, ranks)[0]


def measure_times(runs: Sequence[Callable[[], object]], window_s: float, ranks: Ranks) -> list[Timing]:
    """Measure several calls as `measure_time` does one, taking turns, so that what slows one down slows down all."""
    for run in runs:
        run()
    ranks.wait()
    durations: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + window_s
    while len(durations[0]) < _MIN_RUNS or time.perf_counter() < end:
        for run, own in zip(runs, durations, strict=True):
            begin = time.perf_counter()
            run()
            own.append(time.perf_counter() - begin)
    return [Timing.from_runs(own) for own in durations]
