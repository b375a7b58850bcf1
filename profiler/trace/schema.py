"""The tables of a trace and their columns; docs/trace-format.md describes each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd
import pyarrow as pa

FORMAT = "ebbtide-trace"
SCHEMA = 1
# The folder of the spools in a trace that is being recorded.
SPOOL = "spool"


@dataclass(frozen=True)
class TraceColumn:
    """A column of a table.

    Attributes:
        nullable: Whether a value may be missing.
        categorical: Whether frames have it as a category, with one copy of each value. Of a table with millions of
            samples and few different labels, text takes several times the memory and time.
    """

    name: str
    type: pa.DataType
    nullable: bool = False
    categorical: bool = False


_TIME = pa.int64()
_TEXT = pa.string()
# Text with few different values: one copy of each value, on disk and in memory.
_LABEL = pa.dictionary(pa.int32(), pa.string())

TABLES: dict[str, tuple[TraceColumn, ...]] = {
    "phases": (
        TraceColumn("iteration", pa.int64(), nullable=True),
        TraceColumn("micro_step", pa.int64()),
        TraceColumn("phase", _TEXT),
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("gpu_start_ns", _TIME, nullable=True),
        TraceColumn("gpu_end_ns", _TIME, nullable=True),
    ),
    "memory": (
        TraceColumn("t_ns", _TIME),
        TraceColumn("device", _TEXT, categorical=True),
        TraceColumn("pool", _TEXT, categorical=True),
        TraceColumn("bytes", pa.int64()),
    ),
    "link": (
        TraceColumn("t_ns", _TIME),
        TraceColumn("device", _TEXT, categorical=True),
        TraceColumn("h2d_bytes_per_s", pa.float64(), nullable=True),
        TraceColumn("d2h_bytes_per_s", pa.float64(), nullable=True),
        TraceColumn("source", _TEXT, categorical=True),
        TraceColumn("window_ns", pa.int64()),
        TraceColumn("generation", pa.int64(), nullable=True),
        TraceColumn("width", pa.int64(), nullable=True),
    ),
    "transfers": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("device", _TEXT),
        TraceColumn("direction", _TEXT),
        TraceColumn("bytes", pa.int64(), nullable=True),
        TraceColumn("host_memory", _TEXT, nullable=True),
        TraceColumn("stream", pa.int64(), nullable=True),
        TraceColumn("name", _TEXT),
        TraceColumn("launch_ns", _TIME, nullable=True),
    ),
    "ops": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("resource", _TEXT),
        TraceColumn("name", _TEXT),
        TraceColumn("iteration", pa.int64(), nullable=True),
        TraceColumn("subgroup", pa.int64(), nullable=True),
        TraceColumn("bytes", pa.int64(), nullable=True),
        TraceColumn("parent", pa.int64(), nullable=True),
    ),
    "gpu": (
        TraceColumn("t_ns", _TIME),
        TraceColumn("device", _TEXT),
        TraceColumn("utilization_percent", pa.float64(), nullable=True),
        TraceColumn("memory_utilization_percent", pa.float64(), nullable=True),
        TraceColumn("power_w", pa.float64(), nullable=True),
        TraceColumn("sm_clock_mhz", pa.float64(), nullable=True),
        TraceColumn("memory_clock_mhz", pa.float64(), nullable=True),
        TraceColumn("temperature_celsius", pa.float64(), nullable=True),
        TraceColumn("throttle_reasons", pa.int64(), nullable=True),
    ),
    "kernels": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("device", _LABEL),
        TraceColumn("stream", pa.int64(), nullable=True),
        TraceColumn("kind", _LABEL),
        TraceColumn("name", _LABEL),
        TraceColumn("launch_ns", _TIME, nullable=True),
        TraceColumn("group", _LABEL, nullable=True),
        TraceColumn("flops", pa.int64(), nullable=True),
        TraceColumn("bytes", pa.int64(), nullable=True),
    ),
    "iteration_marks": (
        TraceColumn("iteration", pa.int64()),
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("gpu_end_ns", _TIME, nullable=True),
    ),
    "annotations": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("name", _LABEL),
        TraceColumn("thread", pa.int64(), nullable=True),
    ),
    "allocations": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME, nullable=True),
        TraceColumn("device", _LABEL),
        TraceColumn("bytes", pa.int64()),
        TraceColumn("category", _LABEL, nullable=True),
        TraceColumn("module", _LABEL, nullable=True),
        TraceColumn("stack", _LABEL, nullable=True),
    ),
}

# Tables whose file exists only where they have rows; traces of earlier versions do not have it.
OPTIONAL_TABLES = frozenset({"gpu", "kernels", "iteration_marks", "annotations", "allocations"})

# The column by which the rows of each table are sorted.
SORT = {
    "phases": "start_ns",
    "memory": "t_ns",
    "link": "t_ns",
    "transfers": "start_ns",
    "ops": "start_ns",
    "gpu": "t_ns",
    "kernels": "start_ns",
    "iteration_marks": "start_ns",
    "annotations": "start_ns",
    "allocations": "start_ns",
}


def arrow_schema(table: str) -> pa.Schema:
    return pa.schema([pa.field(c.name, c.type, c.nullable) for c in TABLES[table]])


def frame(table: str, rows: Any = ()) -> pd.DataFrame:
    """Return a frame with the columns and types of a table, sorted by time.

    Nullable integers have the type `Int64`, so that nanoseconds keep every digit; missing floats are NaN. Columns that
    the table does not have are dropped, missing nullable ones are added.

    Args:
        rows: Rows as dicts, or columns as a frame or a dict of arrays.

    Raises:
        ValueError: A value is missing in a column that is not nullable.
    """
    columns = {}
    for column in TABLES[table]:
        values = _values(rows, column.name)
        if not column.nullable and pd.isna(values).any():
            raise ValueError(f"the table {table} needs a column {column.name}, with a value in every row")
        columns[column.name] = values.astype(_dtype(column)).array
    return sort_by_time(table, pd.DataFrame(columns))


@cache
def empty_frame(table: str) -> pd.DataFrame:
    """Return a frame of a table without rows, which callers share and must not change."""
    return frame(table)


def sort_by_time(table: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of a table sorted by time; those of one time keep their order."""
    if rows[SORT[table]].is_monotonic_increasing:
        return rows
    return rows.sort_values(SORT[table], kind="stable", ignore_index=True)


def _values(rows: Any, name: str) -> pd.Series:
    """Return one column. From rows it is built value by value: next to a missing one pandas makes integers floats."""
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
