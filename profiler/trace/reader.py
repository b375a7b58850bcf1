"""Opens a trace, finished or cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import read_meta
from ebbtide.profiler.trace.lock import wait_until_finished
from ebbtide.profiler.trace.metadata_parsing import parse_meta
from ebbtide.profiler.trace.recovery import recovered_traces
from ebbtide.profiler.trace.schema import OPTIONAL_TABLES, TABLES, TraceColumn, frame
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
    wait_until_finished(path)
    raw_meta = read_meta(path)
    meta = parse_meta(raw_meta, path)
    if meta.state == "recording":
        return recovered_traces(path, raw_meta)[0]
    for entry in meta.ranks:
        for table in [table for table in TABLES if table not in OPTIONAL_TABLES]:
            if not _parquet(path, entry.rank, table).is_file():
                raise TraceError(f"{path} is damaged: {_parquet(path, entry.rank, table).name} is missing")
    return Trace(path, raw_meta, lambda rank, table: _read(path, rank, table))


def _parquet(path: Path, rank: int, table: str) -> Path:
    return path / f"rank-{rank}" / f"{table}.parquet"


def _read(path: Path, rank: int, table: str) -> pd.DataFrame:
    file = _parquet(path, rank, table)
    if table in OPTIONAL_TABLES and not file.exists():
        return frame(table)
    try:
        rows = pq.read_table(file)
        for column in TABLES[table]:
            _check(rows.schema, column)
        arrays = {name: rows.column(name).to_pandas(types_mapper=_nullable) for name in rows.column_names}
        return frame(table, arrays)
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path} is damaged: {file.name} of rank {rank} cannot be read ({reason})") from None


def _check(schema: pa.Schema, column: TraceColumn) -> None:
    """Raise ValueError where a column is present with another kind of values; widths may differ."""
    if column.name not in schema.names:
        return
    kind = schema.field(column.name).type
    kinds = pa.types
    fits = {
        pa.int64(): kinds.is_integer,
        pa.float64(): kinds.is_floating,
        pa.string(): _is_text,
    }[pa.string() if kinds.is_dictionary(column.type) else column.type](kind)
    if not fits and not kinds.is_null(kind):
        raise ValueError(f"its column {column.name} is {kind}, not {column.type}")


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values are text, encoded as a dictionary or not."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(values) or pa.types.is_large_string(values))


def _nullable(kind: pa.DataType) -> Any:
    return pd.Int64Dtype() if pa.types.is_integer(kind) else None
