"""Opening a trace, finished or cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import SPOOL, drop_ranks, drop_spools, write_meta, write_rank
from ebbtide.profiler.trace.metadata import read_meta
from ebbtide.profiler.trace.schema import TABLES, Column, frame
from ebbtide.profiler.trace.spools import recover

Load = Callable[[int, str], pd.DataFrame]


class Trace:
    """A trace: its meta, and per rank five tables that are read when first asked for.

    path: its folder. meta: see docs/trace-format.md. notes: lines on what is missing or odd. Times are ns on one
    monotonic clock, sizes bytes, rates bytes/s.
    """

    def __init__(self, path: Path, meta: dict[str, Any], load: Load) -> None:
        self.path = path
        self.meta = meta
        self._load = load
        self._tables: dict[tuple[int, str], pd.DataFrame] = {}

    def __repr__(self) -> str:
        state = self.meta.get("state")
        return f"Trace({str(self.path)!r}, source={self.meta.get('source')!r}, state={state!r}, ranks={self.ranks})"

    @property
    def ranks(self) -> list[int]:
        return [entry["rank"] for entry in self.meta["ranks"]]

    @property
    def notes(self) -> list[str]:
        return list(self.meta.get("notes", []))

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".ebb")

    def rank(self, rank: int) -> dict[str, Any]:
        """The meta entry of one rank. Raises TraceError for a rank that is not there."""
        for entry in self.meta["ranks"]:
            if entry["rank"] == rank:
                return dict(entry)
        known = ", ".join(map(str, self.ranks)) or "none"
        raise TraceError(f"{self.path} has no rank {rank}: it has {known}")

    def table(self, rank: int, name: str) -> pd.DataFrame:
        """A table of one rank, as its columns are in docs/trace-format.md, sorted by time. Do not change it."""
        self.rank(rank)
        key = rank, name
        if key not in self._tables:
            self._tables[key] = self._load(rank, name)
        return self._tables[key]

    def phases(self, rank: int) -> pd.DataFrame:
        return self.table(rank, "phases")

    def memory(self, rank: int) -> pd.DataFrame:
        return self.table(rank, "memory")

    def link(self, rank: int) -> pd.DataFrame:
        return self.table(rank, "link")

    def transfers(self, rank: int) -> pd.DataFrame:
        return self.table(rank, "transfers")

    def ops(self, rank: int) -> pd.DataFrame:
        return self.table(rank, "ops")


def open_trace(path: str | Path) -> Trace:
    """Open a trace. One whose recording was cut off is read from its spools, up to their last whole record.

    Raises TraceError for what is not a trace, is damaged, or has a newer schema. Nothing in it is executed.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta.get("state") == "recording":
        return _recovered(path, meta)
    for entry in meta["ranks"]:
        for table in TABLES:
            if not _parquet(path, entry["rank"], table).is_file():
                raise TraceError(f"{path} is damaged: {_parquet(path, entry['rank'], table).name} is missing")
    return Trace(path, meta, lambda rank, table: _read(path, rank, table))


def finish(path: Path, changes: dict[str, Any]) -> Trace:
    """Turn the spools of a recording into tables; `changes` go into the meta. The spools go last.

    Raises OSError where there is no room: the trace then stays as it was, and still opens from its spools.
    """
    meta = read_meta(path) | changes
    trace = _recovered(path, meta)
    finished = {**trace.meta, "state": "complete"}
    try:
        for rank in trace.ranks:
            write_rank(path, rank, {table: trace.table(rank, table) for table in TABLES})
        write_meta(path, finished)
    except OSError:
        drop_ranks(path, trace.ranks)
        raise
    drop_spools(path)
    return Trace(path, finished, trace.table)


def _recovered(path: Path, meta: dict[str, Any]) -> Trace:
    found, notes = recover(path / SPOOL, meta)
    tables = {(data.meta["rank"], table): data.tables[table] for data in found for table in TABLES}
    meta = {**meta, "ranks": [data.meta for data in found], "notes": [*meta.get("notes", []), *notes]}
    # The first rank's: the others were configured alike.
    told = [facts for data in found if isinstance(facts := data.meta.pop("deepspeed", None), dict)]
    if told:
        meta["deepspeed"] = told[0]
    return Trace(path, meta, lambda rank, table: tables[rank, table])


def _parquet(path: Path, rank: int, table: str) -> Path:
    return path / f"rank-{rank}" / f"{table}.parquet"


def _read(path: Path, rank: int, table: str) -> pd.DataFrame:
    file = _parquet(path, rank, table)
    try:
        rows = pq.read_table(file)
        for column in TABLES[table]:
            _check(rows.schema, column)
        arrays = {name: rows.column(name).to_pandas(types_mapper=_nullable) for name in rows.column_names}
        return frame(table, arrays)
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path} is damaged: {file.name} of rank {rank} cannot be read ({reason})") from None


def _check(schema: pa.Schema, column: Column) -> None:
    """Raise ValueError where a column is there with another kind of values; widths may differ."""
    if column.name not in schema.names:
        return
    kind = schema.field(column.name).type
    kinds = pa.types
    fits = {
        pa.int64(): kinds.is_integer,
        pa.float64(): kinds.is_floating,
        pa.string(): lambda k: kinds.is_string(k) or kinds.is_large_string(k),
    }[column.type](kind)
    if not fits and not kinds.is_null(kind):
        raise ValueError(f"its column {column.name} is {kind}, not {column.type}")


def _nullable(kind: pa.DataType) -> Any:
    return pd.Int64Dtype() if pa.types.is_integer(kind) else None
