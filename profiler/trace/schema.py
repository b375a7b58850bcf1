"""The tables of a trace and their columns; `docs/trace-format.md` says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

FORMAT = "ebbtide-trace"
SCHEMA = 1


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, and whether a value may be missing."""

    name: str
    type: pa.DataType
    nullable: bool = False


_TIME = pa.int64()
_TEXT = pa.string()

TABLES: dict[str, tuple[Column, ...]] = {
    "phases": (
        Column("iteration", pa.int64(), nullable=True),
        Column("micro_step", pa.int64()),
        Column("phase", _TEXT),
        Column("start_ns", _TIME),
        Column("end_ns", _TIME),
        Column("gpu_start_ns", _TIME, nullable=True),
        Column("gpu_end_ns", _TIME, nullable=True),
    ),
    "memory": (
        Column("t_ns", _TIME),
        Column("device", _TEXT),
        Column("pool", _TEXT),
        Column("bytes", pa.int64()),
    ),
    "link": (
        Column("t_ns", _TIME),
        Column("device", _TEXT),
        Column("h2d_bytes_per_s", pa.float64(), nullable=True),
        Column("d2h_bytes_per_s", pa.float64(), nullable=True),
        Column("source", _TEXT),
        Column("window_ns", pa.int64()),
        Column("generation", pa.int64(), nullable=True),
        Column("width", pa.int64(), nullable=True),
    ),
    "transfers": (
        Column("start_ns", _TIME),
        Column("end_ns", _TIME),
        Column("device", _TEXT),
        Column("direction", _TEXT),
        Column("bytes", pa.int64(), nullable=True),
        Column("host_memory", _TEXT, nullable=True),
        Column("stream", pa.int64(), nullable=True),
        Column("name", _TEXT),
    ),
    "ops": (
        Column("start_ns", _TIME),
        Column("end_ns", _TIME),
        Column("resource", _TEXT),
        Column("name", _TEXT),
        Column("iteration", pa.int64(), nullable=True),
        Column("subgroup", pa.int64(), nullable=True),
        Column("bytes", pa.int64(), nullable=True),
        Column("parent", pa.int64(), nullable=True),
    ),
}

# By these the rows of a table stand in order.
SORT = {"phases": "start_ns", "memory": "t_ns", "link": "t_ns", "transfers": "start_ns", "ops": "start_ns"}


def arrow_schema(table: str) -> pa.Schema:
    return pa.schema([pa.field(c.name, c.type, c.nullable) for c in TABLES[table]])


def frame(table: str, rows: Any = ()) -> pd.DataFrame:
    """A pandas frame with the table's columns and types, from rows (dicts) or from columns (a frame, or a dict).

    Columns that may be missing are nullable integers (`Int64`), so that nanoseconds keep every digit; missing
    floats are NaN. Columns that the table does not have are dropped, missing nullable ones added. The rows are
    sorted by time. Raises ValueError where a value is missing that must be there.
    """
    columns = {}
    for column in TABLES[table]:
        values = _values(rows, column.name)
        if not column.nullable and pd.isna(values).any():
            raise ValueError(f"the table {table} needs a column {column.name}, with a value in every row")
        columns[column.name] = values.astype(_dtype(column)).array
    return pd.DataFrame(columns).sort_values(SORT[table], kind="stable", ignore_index=True)


def _values(rows: Any, name: str) -> pd.Series:
    """One column. Of rows it is taken value by value: beside a missing one pandas would make integers floats."""
    if not isinstance(rows, (pd.DataFrame, dict)):
        return pd.Series([row.get(name) for row in rows], dtype=object)
    if name in rows:
        return pd.Series(rows[name])
    length = len(next(iter(rows.values()), ())) if isinstance(rows, dict) else len(rows)
    return pd.Series([None] * length, dtype=object)


def _dtype(column: Column) -> str:
    if pa.types.is_integer(column.type):
        return "Int64" if column.nullable else "int64"
    if pa.types.is_floating(column.type):
        return "float64"
    return "string" if column.nullable else "str"
