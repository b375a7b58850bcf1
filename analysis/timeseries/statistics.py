"""The median and spread that all figures use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats

if TYPE_CHECKING:
    import pandas as pd

# A normal distribution's standard deviation over its median absolute deviation: 1 / its 75 % quantile.
DEVIATIONS_PER_MAD = 1.482602218505602


def median_or_none(values: Floats | pd.Series[float]) -> float | None:
    """Return the median of the values that are not missing; None where all are missing."""
    recorded = values if isinstance(values, np.ndarray) else values.to_numpy(np.float64, na_value=np.nan)
    recorded = recorded[~np.isnan(recorded)]
    return float(np.median(recorded)) if len(recorded) else None


def scaled_mad(values: pd.Series[float]) -> float:
    """Return the scaled median absolute deviation; for normal noise it is the standard deviation.

    Equals `scipy.stats.median_abs_deviation(values, scale="normal")`. Importing scipy.stats takes a second, as long as
    the commands that need this figure run.
    """
    return DEVIATIONS_PER_MAD * float((values - values.median()).abs().median())


def median_error(values: Floats | pd.Series[float]) -> float:
    """Return the standard error of the median of a sample of two values or more.

    It is taken as 1.25 IQR / (1.35 sqrt(n)): McGill, Tukey and Larsen, "Variations of Box Plots", The American
    Statistician 32 (1978), who draw notches by it. It holds for normal values and nearly so for others, and a single
    outlier hardly changes it. Quartiles are at p (n + 1) (Weibull), which makes them wide for few values.
    """
    low, high = np.percentile(values, [25, 75], method="weibull")
    return float(1.25 * (high - low) / (1.35 * np.sqrt(len(values))))
