"""Finds the values that stand out on one side of many, beyond noise and beyond the usual scatter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeseries.statistics import DEVIATIONS_PER_MAD, median_error
from ebbtide.analysis.timeseries.step_functions import Floats

# A value stands out by this many standard errors of its own, and by this many scaled median absolute deviations.
STANDARD_ERRORS = 5.0
DEVIATIONS = 5.0


def median_errors(rows: Floats) -> Floats:
    """Return the standard error of the median of each row without its NaNs; NaN with fewer than two values."""
    recorded = [row[~np.isnan(row)] for row in rows]
    return np.array([median_error(values) if len(values) > 1 else np.nan for values in recorded])


def stands_out(values: Floats, errors: Floats, min_difference: float) -> npt.NDArray[np.bool_]:
    """Return which values are so far above the median that neither noise nor the usual scatter explains it.

    A value stands out if it exceeds the median by `min_difference`, by 5 of its standard errors, and by 5 scaled median
    absolute deviations of all values. Of two values the larger one is compared with the smaller one, without the
    scatter, which two values do not show. There is a value per member of a group, NaN where missing. `min_difference`
    is the smallest difference that matters, in the unit of the values.
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
        scatter = DEVIATIONS_PER_MAD * float(np.median(np.abs(values[recorded] - usual)))
    with np.errstate(invalid="ignore"):
        excess = values - usual
        return (
            recorded & (excess >= min_difference) & (excess > STANDARD_ERRORS * error) & (excess > DEVIATIONS * scatter)
        )
