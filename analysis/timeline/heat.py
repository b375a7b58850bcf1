"""Levels and colours of heat maps of ranks, for pictures and the report."""

from __future__ import annotations

import math

import numpy as np

from ebbtide.analysis.timeseries.step_functions import Floats

# From little to much, each darker than the one before: they differ in grey and for colour-blind readers. The first one
# is that of cells below the first level.
LEVEL_COLORS = ("#f3f3f1", "#fdd0a2", "#f9934a", "#c9480a", "#6b2003")
# Single extreme cells do not set the levels.
_TOP_PERCENTILE = 99.9
_MIN_STEP_MS = 0.01


def heat_levels(values: list[Floats]) -> Floats:
    """Return the levels of heat maps that share them: each is twice the one before, the last one is exceeded by the
    largest values.

    Args:
        values: Milliseconds of each heat map, NaN where not recorded.

    Returns:
        One level fewer than LEVEL_COLORS, ascending: 1, 2 or 5 times a power of ten, times 1, 2, 4, 8.
    """
    recorded = np.concatenate([rows[~np.isnan(rows)] for rows in values])
    top = float(np.percentile(recorded, _TOP_PERCENTILE)) if len(recorded) else 0.0
    count = len(LEVEL_COLORS) - 1
    step = max(top / 2 ** (count - 1), _MIN_STEP_MS)
    power = 10 ** math.floor(math.log10(step))
    nice = max(factor for factor in (1, 2, 5) if factor * power <= step * (1 + 1e-9))
    levels: Floats = nice * power * 2.0 ** np.arange(count)
    return levels
