"""The mean of times beside their median, where a few long ones make them differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.iterations import slowest_times
from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.seams import find_service
from ebbtide.units import ms_text

# Where the mean is more than this many times the median, a headline has both.
_MIN_RATIO = 1.2


@dataclass(frozen=True)
class UnevenTimes:
    """The mean of times that is far above their median, and why.

    Attributes:
        mean_ms: The mean.
        reason: Which times are long.
    """

    mean_ms: float
    reason: str

    @property
    def line(self) -> str:
        return f"the mean is above the median: {self.reason}"


def mean_text(times: UnevenTimes | None) -> str:
    """Return the text to stand behind the median in a headline."""
    return "" if times is None else _beside_median(times.mean_ms)


def mean_text_if_uneven(mean_ms: float, median_ms: float) -> str:
    """Return the text to stand behind the median where the mean is far above it."""
    return _beside_median(mean_ms) if _is_far_above(mean_ms, median_ms) else ""


def _beside_median(mean_ms: float) -> str:
    return f" (median; mean {ms_text(mean_ms)})"


def _is_far_above(mean_ms: float, median_ms: float) -> bool:
    return mean_ms > _MIN_RATIO * median_ms


def uneven(times_ms: Floats, unit: str, where: str = "") -> UnevenTimes | None:
    """Return the mean of times and which of them are long; None where the mean is not
    far above the median.

    Args:
        unit: Name of what takes these times, in the plural.
        where: Text on the part in which the long ones spend more.
    """
    recorded = times_ms[~np.isnan(times_ms)]
    if len(recorded) < 2:
        return None
    mean, median = float(recorded.mean()), float(np.median(recorded))
    if not _is_far_above(mean, median):
        return None
    long = recorded[recorded > _MIN_RATIO * median]
    usual = ms_text(float(np.median(long)))
    reason = f"{len(long)} of {len(recorded)} {unit} take {usual} or so{where}"
    return UnevenTimes(mean, reason)


@once_per_trace
def uneven_iterations(trace: Trace) -> UnevenTimes | None:
    """Return the mean of the steady iterations on the slowest rank, and why it is above
    the median.

    A feature that knows what the job repeats names the reason; else it is the part of
    the long iterations that has most of the excess.
    """
    columns = slowest_times(trace).columns
    times = columns["iteration"]
    result = uneven(times, "iterations", _excess_text(columns, times))
    named = repeated(trace)
    if result is None or named is None:
        return result
    return UnevenTimes(result.mean_ms, named)


@once_per_trace
def repeated(trace: Trace) -> str | None:
    """Return what the job repeats around its iterations, in words; None where no
    feature knows."""
    repeats = find_service("repeats")
    named: str | None = None if repeats is None else repeats(trace)
    return named


@once_per_trace
def repeated_cycle(trace: Trace) -> dict[str, Any] | None:
    """Return the figures of what the job repeats around its iterations; None where no
    feature knows."""
    cycle = find_service("cycle")
    figures: dict[str, Any] | None = None if cycle is None else cycle(trace)
    return figures


def _excess_text(columns: Mapping[str, Floats], times: Floats) -> str:
    excess = {
        part: float(np.nansum(columns[part] - np.nanmedian(columns[part])))
        for part in ITERATION_PARTS
        if not np.isnan(columns[part]).all()
    }
    total = float(np.nansum(times - np.nanmedian(times))) if len(times) else 0.0
    if not excess or total <= 0:
        return ""
    part = max(excess, key=lambda name: excess[name])
    return f", {min(excess[part] / total, 1.0):.0%} of the excess in {part}"
