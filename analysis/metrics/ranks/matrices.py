"""Arithmetic on values of ranks by iterations: a row per rank, a column per iteration, NaN where not recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeseries.step_functions import Floats
from ebbtide.profiler.trace import Trace


def hosts_of(trace: Trace) -> npt.NDArray[np.str_]:
    """Return the host of each rank; empty where not recorded."""
    return np.array([trace.rank(rank).host or "" for rank in trace.ranks])


def centered_rows(values: Floats, groups: npt.NDArray[Any], of_pairs: Callable[..., Any]) -> Floats:
    """Subtract in each column the median of the group's rows, of two rows `of_pairs`; NaN in groups of one row."""
    result = np.full_like(values, np.nan)
    for group in np.unique(groups):
        rows = values[groups == group]
        recorded = ~np.isnan(rows)
        if len(rows) > 1 and recorded.any():
            columns = recorded.sum(axis=0) > 1
            center = of_pairs if len(rows) == 2 else np.nanmedian
            result[np.ix_(groups == group, columns)] = rows[:, columns] - center(rows[:, columns], axis=0)
    return result


def row_medians(rows: Floats) -> Floats:
    """Return the median of each row."""
    medians = np.full(len(rows), np.nan)
    recorded = ~np.isnan(rows).all(axis=1)
    medians[recorded] = np.nanmedian(rows[recorded], axis=1)
    return medians
