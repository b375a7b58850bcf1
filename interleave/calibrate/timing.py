"""Timing what runs over and over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ebbtide.interleave.calibrate.ranks import Ranks

_LEAST_RUNS = 3


@dataclass(frozen=True)
class Timed:
    """seconds: the median of one run. runs: how many. spread: from the 10th to the 90th percentile, over the median."""

    seconds: float
    runs: int
    spread: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timed:
        short, middle, long = map(float, np.percentile(seconds, [10, 50, 90]))
        return cls(middle, len(seconds), (long - short) / middle)


def timed(run: Callable[[], object], window_s: float, ranks: Ranks) -> Timed:
    """Run once unmeasured, wait for the other ranks, then run for that long, three times at least. The run must end
    when its work has ended."""
    run()
    ranks.wait()
    lengths: list[float] = []
    end = time.perf_counter() + window_s
    while len(lengths) < _LEAST_RUNS or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        lengths.append(time.perf_counter() - begin)
    return Timed.of(lengths)
