"""Opens a trace, finished or cut off."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide import profiler
from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import read_meta
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import OPTIONAL_TABLES, TABLES, TraceColumn, empty_frame, frame, sort_by_time
from ebbtide.profiler.trace.trace import Trace


def open_trace(path: str | Path) -> Trace:
    """Open a trace.

    One whose recording was cut off, or goes on, is read from its spools, up to their last complete record. One whose
    job has just ended is waited for until it is finished.

    Nothing in a trace is executed.

    Raises:
        TraceError: The path is not a trace, is damaged, or has a newer schema.
    """
    path = Path(path)
    raw_meta = read_meta(path)
    meta = parse_meta(raw_meta, path)
    if meta.state == "recording":
        return profiler.unfinished_trace(path)
    for entry in meta.ranks:
        for table in [table for table in TABLES if table not in OPTIONAL_TABLES]:
            if not _parquet(path, entry.rank, table).is_file():
                raise TraceError(f"{path} is damaged: {_parquet(path, entry.rank, table).name} is missing")
    return Trace(
        path,
        raw_meta,
        lambda rank, table: _read(path, rank, table),
        lambda rank, table, column: _labels(path, rank, table, column),
    )


def _parquet(path: Path, rank: int, table: str) -> Path:
    return path / f"rank-{rank}" / f"{table}.parquet"


def _read(path: Path, rank: int, table: str) -> pd.DataFrame:
    file = _parquet(path, rank, table)
    if table in OPTIONAL_TABLES and not file.exists():
        return empty_frame(table)
    try:
        # Text of few different values is read as a dictionary: decoding each value takes three times as long.
        # Files of earlier versions lack some columns.
        metadata = pq.read_metadata(file)
        text = [column for column in text_columns(table) if column in metadata.schema.names]
        with pq.ParquetFile(file, metadata=metadata, read_dictionary=text, pre_buffer=True) as parquet:
            rows = parquet.read()
        return arrow_frame(table, rows)
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, file, rank, error) from None


def _labels(path: Path, rank: int, table: str, column: str) -> list[str]:
    """Return the different values of a text column without reading the others, in order of appearance."""
    file = _parquet(path, rank, table)
    if table in OPTIONAL_TABLES and not file.exists():
        return []
    try:
        metadata = pq.read_metadata(file)
        if column not in metadata.schema.names:
            return [str(label) for label in _read(path, rank, table)[column].dropna().unique()]
        with pq.ParquetFile(file, metadata=metadata, read_dictionary=[column]) as parquet:
            values = parquet.read(columns=[column]).column(column)
        return [str(value) for value in values.unique().to_pylist() if value is not None]
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, file, rank, error) from None


def _damaged(path: Path, file: Path, rank: int, error: Exception) -> TraceError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TraceError(f"{path} is damaged: {file.name} of rank {rank} cannot be read ({reason})")


def text_columns(table: str) -> list[str]:
    """Return the names of a table's columns of text, which are best read as dictionaries."""
    return [c.name for c in TABLES[table] if not pa.types.is_integer(c.type) and not pa.types.is_floating(c.type)]


def arrow_frame(table: str, rows: pa.Table) -> pd.DataFrame:
    """Return the frame that `frame` returns for the same rows, without copying numbers.

    `rows`: its rows; integers, floats and text may have other widths, and text may be a dictionary.
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
