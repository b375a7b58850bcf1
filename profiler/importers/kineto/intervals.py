"""Operations on time intervals given as columns of starts and ends."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.int_table import IntArray


def interval_index(times: pd.Series, starts: pd.Series, ends: pd.Series) -> IntArray:
    """Return the index of the interval that contains each time, or -1.

    Args:
        times: Times to look up.
        starts: Starts of the intervals, which are in order and do not overlap.
        ends: Ends of the intervals, exclusive.
    """
    index = np.searchsorted(starts, times, side="right") - 1
    return np.where(times < np.append(ends, np.iinfo(np.int64).min)[index], index, -1)


def outermost(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the intervals that are not inside another one, in order and without overlap.

    An interval that begins inside another one is cut to begin at the end of that one.

    Args:
        spans: Columns start and end, and any others.
    """
    spans = spans.sort_values(["start", "end"], ascending=[True, False], ignore_index=True)
    previous_end = spans["end"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    spans = spans.assign(start=np.maximum(spans["start"], previous_end))
    return spans[spans["end"] > previous_end].reset_index(drop=True)
