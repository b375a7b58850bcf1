"""Turns Arrow tables read from Parquet into frames with the types of a table of the trace."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd
import pyarrow as pa

from ebbtide.profiler.trace.schema import TABLES, TraceColumn, frame, sort_by_time


def text_columns(table: str) -> list[str]:
    """Return the names of a table's columns of text, which are best read as dictionaries."""
    return [c.name for c in TABLES[table] if not pa.types.is_integer(c.type) and not pa.types.is_floating(c.type)]


def arrow_frame(table: str, rows: pa.Table) -> pd.DataFrame:
    """Return the frame that `frame` returns for the same rows, without copying numbers.

    Args:
        table: The name of the table.
        rows: Its rows; integers, floats and text may have other widths, and text may be a dictionary.

    Raises:
        ValueError: A column has values of another kind, or lacks values and is not nullable.
    """
    columns = {}
    for column in TABLES[table]:
        values = _typed(rows.column(column.name), column) if column.name in rows.column_names else None
        if not column.nullable and len(rows) and (values is None or values.null_count):
            raise ValueError(f"the table {table} needs a column {column.name}, with a value in every row")
        dtype = _dtypes(table)[column.name]
        columns[column.name] = _array(pa.nulls(len(rows), _target(column)) if values is None else values, dtype)
    return sort_by_time(table, pd.DataFrame(columns, copy=False))


def _typed(values: pa.ChunkedArray, column: TraceColumn) -> pa.ChunkedArray:
    """Return values with the type of their column; raise ValueError where they are of another kind."""
    kind = values.type
    if pa.types.is_null(kind):
        return values.cast(_target(column))
    if pa.types.is_integer(column.type):
        fits = pa.types.is_integer(kind)
    elif pa.types.is_floating(column.type):
        fits = pa.types.is_floating(kind)
    else:
        fits = _is_text(kind)
    if not fits:
        raise ValueError(f"its column {column.name} is {kind}, not {column.type}")
    return values.unify_dictionaries() if pa.types.is_dictionary(kind) else values.cast(_target(column))


def _target(column: TraceColumn) -> pa.DataType:
    return column.type if pa.types.is_integer(column.type) or pa.types.is_floating(column.type) else pa.large_string()


def _array(values: pa.ChunkedArray | pa.Array, dtype: Any) -> Any:
    if isinstance(dtype, pd.CategoricalDtype):
        labels = pd.Categorical(values.to_pandas())
        return labels.reorder_categories(sorted(labels.categories))
    if isinstance(dtype, (pd.Int64Dtype, pd.StringDtype)):
        text = isinstance(dtype, pd.StringDtype)
        return dtype.__from_arrow__(values.cast(pa.large_string()) if text else values)
    return values.to_pandas().to_numpy()


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values are text, encoded as a dictionary or not."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(values) or pa.types.is_large_string(values))


@cache
def _dtypes(table: str) -> dict[str, Any]:
    return {str(name): dtype for name, dtype in frame(table).dtypes.items()}
