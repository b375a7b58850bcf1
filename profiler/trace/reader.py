"""Opens a trace, finished or cut off."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide import profiler
from ebbtide.errors import TraceError
from ebbtide.profiler.trace.columns import Columns, appearing, one_array, text_codes
from ebbtide.profiler.trace.files import read_meta
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import OPTIONAL_TABLES, TABLES, text_columns, typed_rows
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


def _read(path: Path, rank: int, table: str) -> Columns:
    file = _parquet(path, rank, table)
    if table in OPTIONAL_TABLES and not file.exists():
        return Columns(table, typed_rows(table, pa.Table.from_arrays([], [])))
    try:
        # Text of few different values is read as a dictionary: decoding each value takes three times as long.
        # Files of earlier versions lack some columns.
        metadata = pq.read_metadata(file)
        text = [column for column in text_columns(table) if column in metadata.schema.names]
        with pq.ParquetFile(file, metadata=metadata, read_dictionary=text, pre_buffer=True) as parquet:
            rows = parquet.read()
        return Columns(table, typed_rows(table, rows))
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
            return _read(path, rank, table).labels(column)
        with pq.ParquetFile(file, metadata=metadata, read_dictionary=[column]) as parquet:
            values = parquet.read(columns=[column]).column(column).unify_dictionaries()
        return appearing(*text_codes(one_array(values)))
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, file, rank, error) from None


def _damaged(path: Path, file: Path, rank: int, error: Exception) -> TraceError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TraceError(f"{path} is damaged: {file.name} of rank {rank} cannot be read ({reason})")
