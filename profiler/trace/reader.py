"""Opens a trace, finished or cut off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import drop_ranks, drop_spools, new_trace, read_meta, write_meta, write_rank
from ebbtide.profiler.trace.lock import wait_until_finished
from ebbtide.profiler.trace.metadata import RankInfo, TraceMeta
from ebbtide.profiler.trace.metadata_parsing import parse_meta
from ebbtide.profiler.trace.schema import OPTIONAL_TABLES, SPOOL, TABLES, TraceColumn, frame
from ebbtide.profiler.trace.spools import recover
from ebbtide.profiler.trace.trainings import Training, note_other_trainings

Load = Callable[[int, str], pd.DataFrame]


class Trace:
    """A trace: its metadata, and the tables of each rank, which are read at first use.

    Times are ns on one monotonic clock, sizes bytes, rates bytes/s.

    Attributes:
        path: The folder of the trace.
        raw_meta: The object of meta.json, with keys that the format does not specify. Do not change it.
    """

    def __init__(self, path: Path, raw_meta: dict[str, Any], load: Load) -> None:
        self.path = path
        self.raw_meta = raw_meta
        self._load = load
        self._tables: dict[tuple[int, str], pd.DataFrame] = {}

    def __repr__(self) -> str:
        meta = self.meta
        return f"Trace({str(self.path)!r}, source={meta.source!r}, state={meta.state!r}, ranks={self.ranks})"

    @cached_property
    def meta(self) -> TraceMeta:
        """The typed metadata; its keys are those of meta.json, which docs/trace-format.md specifies."""
        return parse_meta(self.raw_meta, self.path)

    @property
    def ranks(self) -> list[int]:
        """The numbers of the recorded ranks."""
        return [entry.rank for entry in self.meta.ranks]

    @property
    def notes(self) -> list[str]:
        """Lines for people: what is missing or unusual."""
        return list(self.meta.notes)

    @property
    def name(self) -> str:
        """The name of the folder without `.ebb`."""
        return self.path.name.removesuffix(".ebb")

    def rank(self, rank: int) -> RankInfo:
        """Return the metadata of one rank. Raises TraceError for a rank that was not recorded."""
        for entry in self.meta.ranks:
            if entry.rank == rank:
                return entry
        recorded = ", ".join(map(str, self.ranks)) or "none"
        raise TraceError(f"{self.path} has no rank {rank}: it has {recorded}")

    def table(self, rank: int, name: str) -> pd.DataFrame:
        """Return a table of one rank, sorted by time, with the columns of docs/trace-format.md. Do not change it."""
        self.rank(rank)
        key = rank, name
        if key not in self._tables:
            self._tables[key] = self._load(rank, name)
        return self._tables[key]

    def phases(self, rank: int) -> pd.DataFrame:
        """Return the table `phases` of one rank."""
        return self.table(rank, "phases")

    def memory(self, rank: int) -> pd.DataFrame:
        """Return the table `memory` of one rank."""
        return self.table(rank, "memory")

    def link(self, rank: int) -> pd.DataFrame:
        """Return the table `link` of one rank."""
        return self.table(rank, "link")

    def transfers(self, rank: int) -> pd.DataFrame:
        """Return the table `transfers` of one rank."""
        return self.table(rank, "transfers")

    def ops(self, rank: int) -> pd.DataFrame:
        """Return the table `ops` of one rank."""
        return self.table(rank, "ops")

    def gpu(self, rank: int) -> pd.DataFrame:
        """Return the table `gpu` of one rank; empty in traces of earlier versions."""
        return self.table(rank, "gpu")


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


def finish(path: Path, changes: dict[str, Any]) -> list[Trace]:
    """Convert the spools of a recording into tables, then delete the spools.

    Args:
        path: A trace that is being recorded.
        changes: Keys to set in meta.json.

    Returns:
        The finished trace, and one more for each further training that the command ran: RUN-2.ebb, RUN-3.ebb, ...

    Raises:
        OSError: No space is left. The trace is unchanged and still opens from its spools.
    """
    first, *others = recovered_traces(path, read_meta(path) | changes)
    for other in others:
        with new_trace(other.path):
            _write(other.path, other)
    try:
        finished = _write(path, first)
    except OSError:
        drop_ranks(path, first.ranks)
        raise
    drop_spools(path)
    return [finished, *others]


def _write(path: Path, trace: Trace) -> Trace:
    finished = {**trace.raw_meta, "state": "complete"}
    for rank in trace.ranks:
        write_rank(path, rank, {table: trace.table(rank, table) for table in TABLES})
    write_meta(path, finished)
    return Trace(path, finished, trace.table)


def recovered_traces(path: Path, meta: dict[str, Any]) -> list[Trace]:
    """Return a trace per training in the spools of a recording, read into memory.

    The first one has the path of the recording, the others have paths that do not exist yet.
    """
    trainings = recover(path / SPOOL, meta)
    paths = [path, *islice(_free_paths(path), len(trainings) - 1)]
    note_other_trainings(trainings, [free.name for free in paths])
    return [_recovered(free, meta, training) for free, training in zip(paths, trainings, strict=True)]


def _free_paths(path: Path) -> Iterator[Path]:
    """Yield RUN-2.ebb, RUN-3.ebb, ... beside RUN.ebb, as far as they do not exist."""
    for number in count(2):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not os.path.lexists(free):
            yield free


def _recovered(path: Path, meta: dict[str, Any], training: Training) -> Trace:
    tables = {(data.meta["rank"], table): data.tables[table] for data in training.ranks for table in TABLES}
    notes = [*meta.get("notes", []), *training.notes]
    meta = {**meta, "ranks": [data.meta for data in training.ranks], "notes": notes}
    # The first rank's: the others have the same configuration.
    sections = [section for data in training.ranks if isinstance(section := data.meta.pop("deepspeed", None), dict)]
    if sections:
        meta["deepspeed"] = sections[0]
    return Trace(path, meta, lambda rank, table: tables[rank, table])


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
        pa.string(): lambda k: kinds.is_string(k) or kinds.is_large_string(k),
    }[column.type](kind)
    if not fits and not kinds.is_null(kind):
        raise ValueError(f"its column {column.name} is {kind}, not {column.type}")


def _nullable(kind: pa.DataType) -> Any:
    return pd.Int64Dtype() if pa.types.is_integer(kind) else None
