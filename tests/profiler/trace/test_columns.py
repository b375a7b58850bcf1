"""Rows of a table as arrays."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from ebbtide.profiler.trace.columns import Columns


def test_columns__of_a_frame_without_rows_have_no_texts() -> None:
    # As those of a live trace before its first row: pandas gives a category without any
    # value floats.
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


def test_codes__count_equal_texts_of_a_dictionary_as_one() -> None:
    labels = pa.DictionaryArray.from_arrays(
        pa.array([2, 0, None, 1], pa.int32()), pa.array(["a", "b", "a"])
    )
    numbers = pa.array(range(4), pa.int64())
    columns = {
        "start_ns": numbers,
        "end_ns": numbers,
        "device": labels,
        "kind": labels,
        "name": labels,
    }
    rows = Columns(
        "kernels", pa.table({**columns, "group": labels, "operator": labels})
    )
    codes, texts = rows.codes("group")
    assert (codes.tolist(), texts) == ([0, 0, -1, 1], ["a", "b"])
