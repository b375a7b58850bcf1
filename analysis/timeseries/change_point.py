"""Finds where the level of a series changes for good."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.statistics import scaled_mad
from ebbtide.analysis.timeseries.step_functions import Floats

# With fewer values the test below cannot be sure, whatever the values are.
MIN_VALUES = 20
# More values are replaced by medians of neighbours, which resemble each other as the
# test does not expect.
_MAX_BLOCKS = 60
_MAX_P_VALUE = 1e-3
# The medians of the two parts must differ by this many of their common standard errors,
# as in `beyond_spread`.
_STANDARD_ERRORS = 4.0
# The values at the very beginning, which a gradual change is said to leave.
_FIRST_VALUES = 5


class LevelChange(NamedTuple):
    """A change of the level of a series."""

    # Index of the first value after the change; for a gradual one, from where values
    # leave the beginning.
    position: int
    # Median of the first third of a gradual change, else of the values before
    # `position`.
    before: float
    after: float  # Median of the last third.
    is_gradual: bool  # Whether a line fits the values better than a step.
    # Mean difference of the values after `position` from `before`, over all values.
    mean_change: float


def find_change(
    values: Floats, sign: int, min_share: float, scale: float | None = None
) -> LevelChange | None:
    """Return the change of a series in one direction (`sign`: 1 a rise, -1 a fall).

    Return None without one, or with fewer than MIN_VALUES values. The rank test of
    Pettitt ("A non-parametric approach to the change-point problem", Applied Statistics
    28, 1979) finds it, and how likely noise alone has one as large: p = exp(-6 K^2 /
    (n^3 + n^2)), which must be below 0.001. Besides, the last third must differ from
    the part before the change by four standard errors of their medians (McGill, Tukey
    and Larsen, 1978), and by `min_share` of `scale` (None: of the median before the
    change).
    """
    if len(values) < MIN_VALUES:
        return None
    block = -(-len(values) // _MAX_BLOCKS)
    series = (
        np.array(
            [
                np.median(values[start : start + block])
                for start in range(0, len(values), block)
            ]
        )
        * sign
    )
    count = len(series)
    ranks = pd.Series(series).rank().to_numpy()
    # The sum of the signs of all differences between the two parts, by the length of
    # the first part.
    lengths = np.arange(1, count)
    statistic = lengths * (count + 1) - 2 * np.cumsum(ranks)[:-1]
    first = int(lengths[np.argmax(statistic)])
    exponent = -6 * float(statistic.max()) ** 2 / (count**3 + count**2)
    if np.exp(exponent) > _MAX_P_VALUE:
        return None
    third = count // 3
    last = series[-third:]
    is_gradual, slope = _prefers_line(series, first)
    start = series[:third] if is_gradual else series[:first]
    before, after = float(np.median(start)), float(np.median(last))
    change = after - before
    if change < min_share * (abs(before) if scale is None else scale):
        return None
    # Around a line the spread is the spread of its remainders.
    trend = slope * np.arange(count) if is_gradual else np.zeros(count)
    noise = series - (
        trend
        if is_gradual
        else np.where(np.arange(count) < first, before, np.median(series[first:]))
    )
    # Of values that resemble the one before, correlated by r, n tell as much as n (1 -
    # r) / (1 + r) independent ones.
    repeat = _correlation(noise)
    independent = (1 - repeat) / (1 + repeat)
    parts = (
        (series - trend)[part]
        for part in (slice(0, len(start)), slice(count - third, count))
    )
    errors = [1.25 * scaled_mad(part) / math.sqrt(len(part)) for part in parts]
    if change <= _STANDARD_ERRORS * np.sqrt(
        (errors[0] ** 2 + errors[1] ** 2) / independent
    ):
        return None
    if np.exp(exponent * independent) > _MAX_P_VALUE:
        return None
    if is_gradual:
        # From the last value that is nearer the first ones than a tenth of the change.
        near = np.flatnonzero(
            series <= np.median(series[:_FIRST_VALUES]) + 0.1 * change
        )
        first = int(near[-1]) + 1 if len(near) else 0
    position = min(first * block, len(values) - 1)
    mean_change = float(
        np.mean(np.append(np.zeros(position), values[position:] * sign - before))
    )
    return LevelChange(
        position, before * sign, after * sign, is_gradual, mean_change * sign
    )


def _prefers_line(series: Floats, first: int) -> tuple[bool, float]:
    """Return whether a line is nearer the values than a step, and its slope.

    It is the line of Theil and Sen: the median slope.
    """
    positions = np.arange(len(series))
    left, right = np.triu_indices(len(series), 1)
    slope = float(np.median((series[right] - series[left]) / (right - left)))
    line = slope * positions + np.median(series - slope * positions)
    step = np.where(
        positions < first, np.median(series[:first]), np.median(series[first:])
    )
    return bool(np.abs(series - line).sum() < np.abs(series - step).sum()), slope


def _correlation(noise: Floats) -> float:
    """Return how much each value resembles the one before.

    It is the correlation of their ranks, up to 0.95; 0 where it is smaller than
    independent values often have.
    """
    ranks = pd.Series(noise).rank().to_numpy()
    ranks = ranks - ranks.mean()
    squares = float(np.sum(ranks**2))
    correlation = float(np.sum(ranks[1:] * ranks[:-1])) / squares if squares else 0.0
    if correlation <= 1 / math.sqrt(len(noise)):
        return 0.0
    # Noise around a fitted level seems less correlated than it is, by (1 + 3 r) / n
    # (Marriott and Pope, Biometrika 41, 1954); the levels of two halves are fitted
    # here.
    return min(correlation + 2 * (1 + 3 * correlation) / len(noise), 0.95)
