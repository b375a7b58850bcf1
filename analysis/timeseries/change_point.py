"""Finds where the level of a series changes for good."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.timeseries.statistics import scaled_mad
from ebbtide.analysis.timeseries.step_functions import Floats, Ints

# With fewer values the tests below cannot be sure.
MIN_VALUES = 8
# More values are replaced by medians of neighbours, which resemble each other as the
# tests do not expect.
_MAX_BLOCKS = 60
_MAX_P_VALUE = 1e-3
# The medians of the two parts must differ by this many of their common standard errors,
# as in `beyond_spread`.
_STANDARD_ERRORS = 4.0
# Ranks of fewer values cannot reach the smallest p.
_MIN_RANKED = 20
# Fewer values do not show a line in each part.
_MIN_MANY = 40
# A part has at least so many values, and this share of all; but a warm-up ends after so
# many values.
_MIN_PART, _PART_SHARE, _MAX_WARM_UP = 3, 8, 50
# A line in each part is taken where others miss the values by this factor more.
_FAR_NEARER = 1.4
# Remainders that are rounding, as a share of the change.
_ROUNDING = 1e-9
# The last one of so many parts of a series of at least so many values is its end.
_END_SHARE, _MIN_LONG = 6, 96
_MAX_SHARE_BEFORE = 0.5
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
    after: float  # Median of the last third, or of the values in it after the change.
    is_gradual: bool  # Whether a line fits the values better than a step.
    # Mean difference of the values after `position` from `before`, over all values.
    mean_change: float


class _Split(NamedTuple):
    first: int  # Length of the first part.
    deviate: float  # Normal deviate of the difference of the parts.
    splits: int  # Number of splits that were compared.

    def p_value(self, independent: float = 1.0) -> float:
        """Return how likely noise alone has a split as good, by Bonferroni's bound.

        `independent`: share of the values that tell as much as independent ones.
        """
        deviate = self.deviate * math.sqrt(independent)
        return self.splits * 0.5 * math.erfc(deviate / math.sqrt(2))


def find_change(
    values: Floats, sign: int, min_share: float, scale: float | None = None
) -> LevelChange | None:
    """Return the change of a series in one direction (`sign`: 1 a rise, -1 a fall).

    Return None without one, or with fewer than MIN_VALUES values. Student's t of the
    best split (Worsley, "On the likelihood ratio test for a shift in location of normal
    populations", JASA 74, 1979) finds it, of the values or, so that outliers do not
    matter, of their ranks (Conover and Iman, "Rank transformations", The American
    Statistician 35, 1981): p, by Bonferroni's bound, must be below 0.001. Besides, the
    last third must differ from the part before the change by four standard errors of
    their medians (McGill, Tukey and Larsen, 1978), and by `min_share` of `scale` (None:
    of the median before the change). Of a long series without one, the end is looked at
    alone, too: a change there has too few of all values.
    """
    change = _find_change(values, sign, min_share, scale)
    start = len(values) - len(values) // _END_SHARE
    if change is not None or len(values) < _MIN_LONG:
        return change
    level = float(np.median(values[:start]))
    at_end = _find_change(values[start:], sign, min_share, scale)
    # The end of a wave begins low: all before counts, not the begin of the end alone.
    least = min_share * (abs(level) if scale is None else scale)
    if at_end is None or (at_end.after - level) * sign < least:
        return None
    position = start + at_end.position
    # Fewer values may be an evaluation, and as many may have been as high before.
    length = len(values) - position
    if length < MIN_VALUES:
        return None
    highest = max(
        float(np.median(values[at : at + length] - level)) * sign
        for at in range(0, start, length)
    )
    if highest > _MAX_SHARE_BEFORE * (at_end.after - level) * sign:
        return None
    rise = float(np.sum(values[position:] - level)) / len(values)
    return LevelChange(position, level, at_end.after, at_end.is_gradual, rise)


def _find_change(
    values: Floats, sign: int, min_share: float, scale: float | None
) -> LevelChange | None:
    if len(values) < MIN_VALUES:
        return None
    block = -(-len(values) // _MAX_BLOCKS)
    starts = range(0, len(values), block)
    medians = [np.median(values[start : start + block]) for start in starts]
    series = np.array(medians) * sign
    split = _best_split(series, block)
    if split.p_value() > _MAX_P_VALUE:
        return None
    count, first = len(series), split.first
    is_gradual, fitted, parameters = _fit(series, first)
    # A third of 8 values is too few for a median.
    third = max(count // 3, _MIN_PART)
    start = series[: third if is_gradual else first]
    last = series[count - third if is_gradual else max(first, count - third) :]
    before, after = float(np.median(start)), float(np.median(last))
    change = after - before
    if change < min_share * (abs(before) if scale is None else scale):
        return None
    noise = series - fitted
    noise[np.abs(noise) <= _ROUNDING * change] = 0.0
    # Of values that resemble the one before, correlated by r, n tell as much as n (1 -
    # r) / (1 + r) independent ones.
    repeat = _correlation(noise, parameters)
    independent = (1 - repeat) / (1 + repeat)
    parts = noise[: len(start)], noise[count - len(last) :]
    errors = [1.25 * scaled_mad(part) / math.sqrt(len(part)) for part in parts]
    if change <= _STANDARD_ERRORS * math.hypot(*errors) / math.sqrt(independent):
        return None
    if split.p_value(independent) > _MAX_P_VALUE:
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


def _best_split(series: Floats, block: int) -> _Split:
    """Return the split of a series, of medians of `block` values, with the clearest
    rise."""
    count = len(series)
    share = -(-count // _PART_SHARE)
    fewest = max(min(share, -(-_MAX_WARM_UP // block)), _MIN_PART)
    lengths = np.arange(fewest, count - max(share, _MIN_PART) + 1)
    deviates = _deviates(series, lengths)
    if count >= _MIN_RANKED:
        by_rank = _deviates(pd.Series(series).rank().to_numpy(), lengths)
        deviates = max(deviates, by_rank, key=lambda each: float(each.max()))
    best = int(np.argmax(deviates))
    return _Split(int(lengths[best]), float(deviates[best]), len(lengths))


def _deviates(series: Floats, lengths: Ints) -> Floats:
    """Return the normal deviate of the rise between two parts, by the length of the
    first; 0 for a fall.

    It is Student's t with n - 2 degrees of freedom after Wallace ("Bounds on normal
    approximations to Student's and the chi-square distributions", Annals of
    Mathematical Statistics 30, 1959): t^2 / (n - 2) is the squares between the parts
    over those within.
    """
    count, freedom = len(series), len(series) - 2
    centred = series - series.mean()
    total = float(np.sum(centred**2))
    sums = np.cumsum(centred)[lengths - 1]
    between = sums**2 * count / (lengths * (count - lengths))
    if not total:
        return np.zeros(len(lengths))
    within = np.maximum(total - between, _ROUNDING * total)
    deviates = np.sqrt(freedom * np.log(total / within))
    rises: Floats = np.where(sums < 0, deviates, 0.0)
    return rises * (8 * freedom + 1) / (8 * freedom + 3)


def _fit(series: Floats, first: int) -> tuple[bool, Floats, int]:
    """Return whether a line is nearer the values than a step, the nearest fit, and the
    number of its parameters.

    A fit is a step, a line, or, of many values that it is far nearer, a line in each
    part.
    """
    step = np.full(len(series), np.median(series[:first]))
    step[first:] = np.median(series[first:])
    line = _line(series)
    step_error = float(np.abs(series - step).sum())
    line_error = float(np.abs(series - line).sum())
    is_gradual = line_error < step_error
    if len(series) >= _MIN_MANY:
        part = len(series) // _PART_SHARE
        pairs = [
            np.append(_line(series[:end]), _line(series[end:]))
            for end in (first, *range(part, len(series) - part, part))
        ]
        errors = [float(np.abs(series - pair).sum()) for pair in pairs]
        if _FAR_NEARER * min(errors) < min(step_error, line_error):
            return is_gradual, pairs[int(np.argmin(errors))], 5
    return is_gradual, line if is_gradual else step, 2


def _line(series: Floats) -> Floats:
    """Return the line of Theil and Sen, whose slope is the median slope."""
    positions = np.arange(len(series))
    left, right = np.triu_indices(len(series), 1)
    slope = np.median((series[right] - series[left]) / (right - left))
    line: Floats = slope * positions + np.median(series - slope * positions)
    return line


def _correlation(noise: Floats, parameters: int) -> float:
    """Return how much each value resembles the one before: the correlation of their
    ranks, up to 0.95; 0 where it is smaller than independent values often have."""
    ranks = pd.Series(noise).rank().to_numpy()
    ranks = ranks - ranks.mean()
    squares = float(np.sum(ranks**2))
    correlation = float(np.sum(ranks[1:] * ranks[:-1])) / squares if squares else 0.0
    if correlation <= 1 / math.sqrt(len(noise)):
        return 0.0
    # Noise around a fitted level seems less correlated than it is, by (1 + 3 r) / n
    # (Marriott and Pope, Biometrika 41, 1954), for each parameter of the fit.
    bias = parameters * (1 + 3 * correlation) / len(noise)
    return min(correlation + bias, 0.95)
