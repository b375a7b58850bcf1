"""Tests of frames made from Arrow tables, compared with `frame`, which builds them
value by value."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.profiler.trace.columns import Columns
from ebbtide.profiler.trace.frames import arrow_frame, frame
from ebbtide.profiler.trace.schema import SORT, TABLES, TraceColumn, is_text, typed_rows
from tests.conftest import examples

Rows = list[dict[str, Any]]

INTEGERS = [pa.int32(), pa.int64(), pa.uint32()]
FLOATS = [pa.float32(), pa.float64()]
TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]


def value(column: TraceColumn) -> st.SearchStrategy[Any]:
    present: st.SearchStrategy[Any] = st.sampled_from(["", "b", "a", "\u00e9"])
    if pa.types.is_integer(column.type):
        present = st.integers(0, 2**31 - 1)
    elif pa.types.is_floating(column.type):
        present = st.floats(width=32, allow_nan=False)
    return st.none() | present if column.nullable else present


def types(column: TraceColumn) -> st.SearchStrategy[pa.DataType]:
    if pa.types.is_integer(column.type):
        return st.sampled_from(INTEGERS)
    return st.sampled_from(FLOATS if pa.types.is_floating(column.type) else TEXTS)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, Rows, pa.Table]:
    """Draw a table of the trace: its name, rows, and an Arrow table of them in chunks,
    with columns of any width."""
    name = draw(st.sampled_from(sorted(TABLES)))
    columns = [c for c in TABLES[name] if not c.nullable or draw(st.booleans())]
    parts = draw(
        st.lists(
            st.lists(
                st.fixed_dictionaries({c.name: value(c) for c in columns}), max_size=4
            ),
            max_size=3,
        )
    )
    schema = pa.schema([(column.name, draw(types(column))) for column in columns])
    chunks = [pa.Table.from_pylist(part, schema) for part in parts]
    return (
        name,
        [row for part in parts for row in part],
        pa.concat_tables([schema.empty_table(), *chunks]),
    )


@settings(max_examples=examples(60, by_default=8))
@given(tables())
def test_arrow_frame__is_the_frame_of_the_same_rows(
    table: tuple[str, Rows, pa.Table],
) -> None:
    name, rows, arrow = table
    result, expected = arrow_frame(name, arrow), frame(name, rows)
    assert list(result[SORT[name]]) == sorted(row[SORT[name]] for row in rows)
    pd.testing.assert_frame_equal(result, expected, check_categorical=False)
    for column in result.select_dtypes("category"):
        assert list(result[column].cat.categories) == sorted(
            result[column].cat.categories
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": pa.array(["many"])}, "its column bytes is string, not int64"),
        ({"pool": pa.array([7])}, "its column pool is int64, not string"),
        ({"pool": pa.array([None], pa.string())}, "needs a column pool"),
        ({"pool": None}, "needs a column pool"),
    ],
)
def test_arrow_frame__refuses_other_kinds_and_missing_values(
    change: dict[str, Any], message: str
) -> None:
    columns = {"t_ns": [1], "device": ["cpu"], "pool": ["heap"], "bytes": [1]} | change
    rows = pa.table(
        {name: values for name, values in columns.items() if values is not None}
    )
    with pytest.raises(ValueError, match=message):
        arrow_frame("memory", rows)


@settings(max_examples=examples(60, by_default=15))
@given(tables(), st.booleans())
def test_columns__have_the_values_of_the_frame(
    table: tuple[str, Rows, pa.Table], from_arrow: bool
) -> None:
    name, rows, arrow = table
    expected = frame(name, rows)
    columns = Columns(name, typed_rows(name, arrow) if from_arrow else expected)
    assert len(columns) == len(rows)
    pd.testing.assert_frame_equal(columns.frame, expected, check_categorical=False)
    for column in TABLES[name]:
        values = expected[column.name]
        assert columns.recorded(column.name).tolist() == values.notna().tolist()
        present = [value for value in values if not pd.isna(value)]
        if is_text(column.type):
            texts = columns.texts(column.name)
            assert [text for text in texts if text is not None] == present
            assert columns.labels(column.name) == list(dict.fromkeys(present))
            assert columns.equal(column.name, "a").tolist() == [
                text == "a" for text in texts
            ]
        elif pa.types.is_integer(column.type):
            assert (
                columns.ints(column.name)[columns.recorded(column.name)].tolist()
                == present
            )
        else:
            assert [
                value for value in columns.floats(column.name) if value == value
            ] == present
