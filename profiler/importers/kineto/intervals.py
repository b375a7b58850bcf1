"""Spans of time, as columns of starts and ends."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.chrome_trace.int_table import Ints


def within(times: pd.Series, starts: pd.Series, ends: pd.Series) -> Ints:
    """Which of some spans, which are apart and in order, each time lies in; -1: in none."""
    at = np.searchsorted(starts, times, side="right") - 1
    return np.where(times < np.append(ends, np.iinfo(np.int64).min)[at], at, -1)


def outermost(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans (start, end) in order, without those that lie within another; what begins in another begins at its end."""
    spans = spans.sort_values(["start", "end"], ascending=[True, False], ignore_index=True)
    before = spans["end"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    spans = spans.assign(start=np.maximum(spans["start"], before))
    return spans[spans["end"] > before].reset_index(drop=True)
