"""Rows of a table as arrays."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.profiler.trace.columns import Columns


def test_columns__of_a_frame_without_rows_have_no_texts() -> None:
    # As those of a live trace before its first row: pandas gives a category without any value floats.
    frame = pd.DataFrame(
        {
            "t_ns": np.array([], np.int64),
            "device": pd.Categorical([None])[:0],
            "pool": pd.Categorical([]),
            "bytes": np.array([], np.int64),
        }
    ).astype({"device": pd.CategoricalDtype(np.array([], np.float64))})
    rows = Columns("memory", frame)
    assert rows.labels("device") == rows.labels("pool") == []
    assert rows.texts("device").tolist() == []
    assert rows.ints("bytes").tolist() == []
