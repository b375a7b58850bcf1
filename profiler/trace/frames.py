"""Makes pandas frames of the tables of a trace."""

from functools import cache
from typing import Any

import pandas as pd
import pyarrow as pa

from ebbtide.profiler.trace.schema import SORT, TABLES, TraceColumn, typed_rows


def frame(table: str, rows: Any = ()) -> pd.DataFrame:
    """Return a frame with the columns and types of a table, sorted by time. `rows` are
    dicts, or columns as a frame or a dict of arrays. Raises ValueError where a value is
    missing in a column that is not nullable.

    Nullable integers have the type `Int64`, so that nanoseconds keep every digit;
    missing floats are NaN. Columns that the table does not have are dropped, missing
    nullable ones are added."""
    columns = {}
    for column in TABLES[table]:
        values = _values(rows, column.name)
        if not column.nullable and pd.isna(values).any():
            raise ValueError(
                f"the table {table} needs a column {column.name}, with a value in "
                "every row"
            )
        columns[column.name] = values.astype(_dtype(column)).array
    return sort_by_time(table, pd.DataFrame(columns))


@cache
def empty_frame(table: str) -> pd.DataFrame:
    """Return a table's frame without rows, which callers share and must not change."""
    return frame(table)


def sort_by_time(table: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of a table sorted by time.

    Rows with the same time keep their order.
    """
    if rows[SORT[table]].is_monotonic_increasing:
        return rows
    return rows.sort_values(SORT[table], kind="stable", ignore_index=True)


def _values(rows: Any, name: str) -> pd.Series:
    """Return one column. From rows it is built value by value: next to a missing one
    pandas makes integers floats."""
    if not isinstance(rows, (pd.DataFrame, dict)):
        return pd.Series([row.get(name) for row in rows], dtype=object)
    if name in rows:
        return pd.Series(rows[name])
    length = len(next(iter(rows.values()), ())) if isinstance(rows, dict) else len(rows)
    return pd.Series([None] * length, dtype=object)


def _dtype(column: TraceColumn) -> str:
    if pa.types.is_integer(column.type):
        return "Int64" if column.nullable else "int64"
    if pa.types.is_floating(column.type):
        return "float64"
    if column.categorical or pa.types.is_dictionary(column.type):
        return "category"
    return "string" if column.nullable else "str"


def arrow_frame(table: str, rows: pa.Table) -> pd.DataFrame:
    """Return the frame that `frame` returns for the same rows, without copying numbers;
    `rows`: see `typed_rows`."""
    typed = typed_rows(table, rows)
    columns = {
        name: _array(typed.column(name), dtype)
        for name, dtype in _dtypes(table).items()
    }
    return sort_by_time(table, pd.DataFrame(columns, copy=False))


def _array(values: pa.ChunkedArray, dtype: Any) -> Any:
    if isinstance(dtype, pd.CategoricalDtype):
        labels = pd.Categorical(values.to_pandas())
        return labels.reorder_categories(sorted(labels.categories))
    if isinstance(dtype, (pd.Int64Dtype, pd.StringDtype)):
        text = isinstance(dtype, pd.StringDtype)
        return dtype.__from_arrow__(values.cast(pa.large_string()) if text else values)
    return values.to_pandas().to_numpy()


@cache
def _dtypes(table: str) -> dict[str, Any]:
    return {str(name): dtype for name, dtype in frame(table).dtypes.items()}
