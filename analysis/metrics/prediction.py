"""Traces of dry runs: the line that says so, and the ranges of their times."""

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.profiler.trace import Trace

PREDICTED = "predicted by a dry run"


@dataclass(frozen=True)
class TimeRange:
    """The time of a part of an iteration under fast and under slow assumptions, ms."""

    low_ms: float
    high_ms: float


def is_predicted(trace: Trace) -> bool:
    """Return whether a dry run made a trace."""
    return trace.meta.source == "predicted"


def prediction_line(trace: Trace) -> str | None:
    """Return the line that every output has for a dry run's trace; None for others."""
    if not is_predicted(trace):
        return None
    machine = (
        trace.meta.prediction.machine if trace.meta.prediction is not None else None
    )
    return f"{PREDICTED}, not measured{f' (machine {machine})' if machine else ''}"


@once_per_trace
def predicted_range(trace: Trace, part: str) -> TimeRange | None:
    """Return the range of the time of a phase, `other` or `iteration`.

    Each end is taken as the median of measured times is: of the slowest rank. None for
    measured traces, and without a steady iteration.
    """
    if trace.meta.prediction is None:
        return None
    numbers, slowest = (
        set(steady_iterations(trace).numbers),
        dict[int, tuple[float, float]](),
    )
    for time in trace.meta.prediction.times:
        if time.phase == part and time.iteration in numbers:
            low_ms, high_ms = slowest.get(time.iteration, (0.0, 0.0))
            slowest[time.iteration] = (
                max(low_ms, time.low_ms),
                max(high_ms, time.high_ms),
            )
    return (
        TimeRange(*np.median(list(slowest.values()), axis=0).tolist())
        if slowest
        else None
    )
