"""The median and spread that all figures use.

Also values that stand out beyond noise and the usual scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeseries.step_functions import Floats

if TYPE_CHECKING:
    import pandas as pd

Number = TypeVar("Number", int, float)
# A normal distribution's standard deviation over its median absolute deviation: 1 / its
# 75 % quantile.
DEVIATIONS_PER_MAD = 1.482602218505602


def median_or_none(values: Floats | pd.Series[float]) -> float | None:
    """Return the median of the values that are not missing, None if all are missing."""
    recorded = (
        values
        if isinstance(values, np.ndarray)
        else values.to_numpy(np.float64, na_value=np.nan)
    )
    recorded = recorded[~np.isnan(recorded)]
    return float(np.median(recorded)) if len(recorded) else None


def sum_or_none(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of the values that are known; None where none is."""
    recorded = [value for value in values if value is not None]
    return sum(recorded) if recorded else None


def scaled_mad(values: Floats) -> float:
    """Return the scaled median absolute deviation.

    For normal noise it is the standard deviation: `median_abs_deviation(values,
    scale="normal")` of scipy.stats, whose import takes as long as the commands that
    need it.
    """
    return DEVIATIONS_PER_MAD * float(np.median(np.abs(values - np.median(values))))


def median_error(values: Floats | pd.Series[float]) -> float:
    """Return the standard error of the median of two values or more.

    It is 1.25 IQR / (1.35 sqrt(n)), with quartiles at p (n + 1) (McGill, Tukey and
    Larsen, "Variations of Box Plots", The American Statistician 32, 1978). It holds for
    normal values and nearly so for others, and a single outlier hardly changes it.
    """
    return float(median_errors(np.asarray(values, np.float64)[None])[0])


# A value stands out by this many standard errors of its own, and by this many scaled
# median absolute deviations.
STANDARD_ERRORS = 5.0
DEVIATIONS = 5.0


def median_errors(rows: Floats) -> Floats:
    """Return the standard error of the median of each row without its NaNs; NaN with
    fewer than two values."""
    counts = (~np.isnan(rows)).sum(axis=1)
    errors = np.full(len(rows), np.nan)
    ordered = np.sort(rows, axis=1)
    # Rows with as many values at once.
    for count in np.unique(counts[counts > 1]).tolist():
        own = counts == count
        low, high = np.percentile(
            ordered[own, :count], [25, 75], axis=1, method="weibull"
        )
        errors[own] = 1.25 * (high - low) / (1.35 * np.sqrt(count))
    return errors


def stands_out(
    values: Floats, errors: Floats, min_difference: float
) -> npt.NDArray[np.bool_]:
    """Return which values (NaN: missing) stand out above the median.

    They exceed it by `min_difference`, by 5 of its standard errors, and by 5 scaled
    median absolute deviations of all values, so that neither noise nor the usual
    scatter explains it. Of two values the larger one is compared with the smaller one,
    without the scatter, which two values do not show.
    """
    recorded = ~np.isnan(values) & ~np.isnan(errors)
    count = int(recorded.sum())
    if count < 2:
        return np.zeros(len(values), bool)
    usual, scatter = float(np.median(values[recorded])), 0.0
    error = np.where(recorded, errors, 0.0)
    if count == 2:
        usual = float(np.min(values[recorded]))
        # What one rank has more, the other has less: their errors do not cancel.
        error = np.full(len(values), float(np.sum(errors[recorded])))
    else:
        scatter = DEVIATIONS_PER_MAD * float(
            np.median(np.abs(values[recorded] - usual))
        )
    with np.errstate(invalid="ignore"):
        excess = values - usual
        return (
            recorded
            & (excess >= min_difference)
            & (excess > STANDARD_ERRORS * error)
            & (excess > DEVIATIONS * scatter)
        )
