"""The median and spread that all figures use."""

from __future__ import annotations

import pandas as pd

# A normal distribution's standard deviation over its median absolute deviation: 1 / its 75 % quantile.
_DEVIATIONS_PER_MAD = 1.482602218505602


def median_or_none(values: pd.Series[float]) -> float | None:
    """Return the median of the values that are not missing; None where all are missing."""
    recorded = values.dropna()
    return float(recorded.median()) if len(recorded) else None


def scaled_mad(values: pd.Series[float]) -> float:
    """Return the scaled median absolute deviation; for normal noise it is the standard deviation.

    Equals `scipy.stats.median_abs_deviation(values, scale="normal")`. Importing scipy.stats takes a second, as long as
    the commands that need this figure run.
    """
    return _DEVIATIONS_PER_MAD * float((values - values.median()).abs().median())
