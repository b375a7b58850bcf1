"""The tables of a trace and their columns; docs/trace-format.md describes each."""

from dataclasses import dataclass
from functools import cache, cached_property

import pyarrow as pa

FORMAT = "ebbtide-trace"
SCHEMA = 1
# The folder of the spools in a trace that is being recorded.
SPOOL = "spool"


@dataclass(frozen=True)
class TraceColumn:
    """A column of a table."""

    name: str
    type: pa.DataType
    nullable: bool = False  # Whether a value may be missing.
    # Whether frames have it as a category, with one copy of each value. Of a table with
    # millions of samples and few different labels, text takes several times the memory
    # and time.
    categorical: bool = False

    @cached_property
    def read_type(self) -> pa.DataType:
        """The type of the values of a table that is read; text may be a dictionary."""
        return pa.large_string() if is_text(self.type) else self.type


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
        TraceColumn("operator", _LABEL, nullable=True),
        TraceColumn("flops", pa.int64(), nullable=True),
        TraceColumn("bytes", pa.int64(), nullable=True),
    ),
    "calls": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("name", _LABEL),
        TraceColumn("thread", pa.int64(), nullable=True),
        TraceColumn("stream", pa.int64(), nullable=True),
        TraceColumn("awaited_stream", pa.int64(), nullable=True),
        TraceColumn("awaited_ns", _TIME, nullable=True),
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
    "marks": (
        TraceColumn("start_ns", _TIME),
        TraceColumn("end_ns", _TIME),
        TraceColumn("gpu_start_ns", _TIME, nullable=True),
        TraceColumn("gpu_end_ns", _TIME, nullable=True),
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

# Tables whose file exists only where they have rows; traces of earlier versions do not
# have it.
OPTIONAL_TABLES = frozenset(
    {
        "gpu",
        "kernels",
        "calls",
        "iteration_marks",
        "annotations",
        "marks",
        "allocations",
    }
)

# The column by which the rows of each table are sorted.
SORT = {
    table: next(
        column.name for column in columns if column.name in ("t_ns", "start_ns")
    )
    for table, columns in TABLES.items()
}


def arrow_schema(table: str) -> pa.Schema:
    return pa.schema([pa.field(c.name, c.type, c.nullable) for c in TABLES[table]])


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text, encoded as a dictionary or not."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(values) or pa.types.is_large_string(values))


@cache
def text_columns(table: str) -> list[str]:
    return [column.name for column in TABLES[table] if is_text(column.type)]


def typed_rows(table: str, rows: pa.Table) -> pa.Table:
    """Return rows with the columns of a table, numbers with their types.

    `rows`: integers, floats and text may have other widths, and text may be a
    dictionary.

    Raises:
        ValueError: A column is of another kind, or a value is missing that must not
            be.
    """
    columns, present = {}, set(rows.column_names)
    for column in TABLES[table]:
        values = (
            _typed(rows.column(column.name), column) if column.name in present else None
        )
        if not column.nullable and len(rows) and (values is None or values.null_count):
            raise ValueError(
                f"the table {table} needs a column {column.name}, with a value in "
                "every row"
            )
        columns[column.name] = _nulls(len(rows), column) if values is None else values
    return pa.Table.from_arrays(list(columns.values()), list(columns))


def _typed(values: pa.ChunkedArray, column: TraceColumn) -> pa.ChunkedArray:
    """Return values with the type of their column.

    Raise ValueError where they are of another kind.
    """
    kind, target = values.type, column.read_type
    if kind == target:
        return values
    if pa.types.is_null(kind.value_type if pa.types.is_dictionary(kind) else kind):
        return values.cast(target)
    if (
        is_text(column.type)
        and not is_text(kind)
        and pa.types.is_dictionary(kind)
        and values.null_count == len(values)
    ):
        # A pandas category without any value has categories of floats.
        return pa.chunked_array([_nulls(len(values), column)])
    if pa.types.is_integer(column.type):
        fits = pa.types.is_integer(kind)
    elif pa.types.is_floating(column.type):
        fits = pa.types.is_floating(kind)
    else:
        fits = is_text(kind)
    if not fits:
        raise ValueError(f"its column {column.name} is {kind}, not {column.type}")
    return (
        values.unify_dictionaries()
        if pa.types.is_dictionary(kind)
        else values.cast(target)
    )


def _nulls(count: int, column: TraceColumn) -> pa.Array:
    """Return missing values.

    Missing texts are a dictionary, which takes half of the memory, as texts in files
    are.
    """
    kind = column.read_type
    return pa.nulls(count, pa.dictionary(pa.int32(), kind) if is_text(kind) else kind)
