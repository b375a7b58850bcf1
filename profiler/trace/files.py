"""Reads and writes the files of a trace, and opens it. A trace is finished in one step
and never half replaced."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide import seams
from ebbtide.errors import TraceError
from ebbtide.profiler.trace.columns import Columns, distinct_texts
from ebbtide.profiler.trace.metadata import parse_meta
from ebbtide.profiler.trace.schema import (
    FORMAT,
    OPTIONAL_TABLES,
    SCHEMA,
    SPOOL,
    TABLES,
    arrow_schema,
    text_columns,
    typed_rows,
)
from ebbtide.profiler.trace.trace import Trace
from ebbtide.profiler.trace.untrusted import (
    MAX_META_BYTES,
    TraceFiles,
    check_size,
    check_values,
    files_of,
)
from ebbtide.urls import Url, location

if TYPE_CHECKING:
    import pandas as pd


META = "meta.json"
# In the folder of the spools: locked by the process that will finish the trace.
LOCK = "recording.lock"
# Files of tables without rows have fewer bytes.
_SMALL_BYTES = 2048
# Tables with more rows are read column by column.
_LARGE_ROWS = 1 << 20


@contextlib.contextmanager
def new_trace(
    path: Path, force: bool = False, recording: bool = False
) -> Iterator[None]:
    """Create the folder of a new trace, for the block to fill. If the block raises, the
    file system is as before.

    Args:
        force: Replace a trace at `path`; anything else is never replaced.
        recording: Whether a recording begins: it replaces all traces of the one before
            it (RUN-2.ebb, ...).

    Raises:
        TraceError: Something exists at `path`, it is being recorded, or nothing can be
            written.
    """
    exists = os.path.lexists(path)
    if exists and not force:
        raise TraceError(
            f"{path} exists already: choose another path, or replace it (--force, "
            "force=True)"
        )
    if exists and not is_trace(path):
        raise TraceError(
            f"{path} is not a trace: --force replaces only traces, choose another -o"
        )
    if exists and is_locked(path):
        raise TraceError(
            f"{path} is being recorded: wait until its job has ended, or choose "
            "another path"
        )
    new_folders = [parent for parent in path.parents if not os.path.exists(parent)]
    backup: Path | None = None
    created = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if exists:
            replaced = [path, *(_other_trainings(path) if recording else ())]
            backup = Path(tempfile.mkdtemp(prefix=".ebbtide-", dir=path.parent))
            for old in replaced:
                os.replace(old, backup / old.name)
        path.mkdir()
        created = True
        yield
    except BaseException as error:
        if created:
            shutil.rmtree(path, ignore_errors=True)
        _undo(path, backup, new_folders)
        if isinstance(error, OSError):
            raise TraceError(
                f"cannot write {path}: {error.strerror or error}"
            ) from None
        raise
    if backup is not None:
        shutil.rmtree(backup, ignore_errors=True)


def _undo(path: Path, backup: Path | None, new_folders: list[Path]) -> None:
    if backup is not None:
        for name in os.listdir(backup):
            os.replace(backup / name, path.with_name(name))
        backup.rmdir()
    for folder in new_folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _other_trainings(path: Path) -> list[Path]:
    """Return the traces RUN-2.ebb, RUN-3.ebb, ... recorded together with RUN.ebb."""
    numbered = re.compile(
        rf"{re.escape(path.stem)}-[0-9]+{re.escape(path.suffix)}"
    ).fullmatch
    begin = _recording_begin(path)
    return [
        p
        for p in path.parent.iterdir()
        if numbered(p.name) and begin and _recording_begin(p) == begin
    ]


def _recording_begin(path: Path) -> tuple[Any, ...] | None:
    """Return both clocks at the beginning of a recording, and their host.

    Return None if `path` is none.
    """
    meta = read_meta(path) if is_trace(path) else {}
    return (meta["started_ns"], meta.get("clock")) if meta.get("started_ns") else None


def is_locked(path: Path) -> bool:
    """Return whether a trace is being recorded."""
    try:
        fd = os.open(path / SPOOL / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Only Linux records, and other systems may lack it.
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def is_trace(path: Path) -> bool:
    """Return whether a path is the folder of a trace, of any schema."""
    try:
        path = location(path)
        meta = json.loads(files_of(path).read(path / META, MAX_META_BYTES))
        return bool(meta.get("format") == FORMAT)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def read_meta(path: Path) -> dict[str, Any]:
    """Read the object of a trace's meta.json, and check that this version of ebbtide
    can read its schema."""
    files = files_of(path)
    if not isinstance(path, Url) and not os.path.exists(path):
        raise TraceError(
            f"{path} does not exist: name a trace that `ebbtide profile` has written"
        )
    try:
        meta = json.loads(files.read(path / META, MAX_META_BYTES))
    except RecursionError:
        raise TraceError(
            f"{path} is not a trace: its {META} is nested too deeply"
        ) from None
    except NotADirectoryError:
        remedy = (
            "what another tool wrote becomes one by `ebbtide import "
            f"{shlex.quote(str(path))} -o run.ebb`"
        )
        raise TraceError(
            f"{path} is a file, and a trace is a folder: {remedy}"
        ) from None
    except OSError as error:
        raise TraceError(
            f"{path} is not a trace: it has no readable {META} ({error.strerror})"
        ) from None
    except ValueError:
        raise TraceError(
            f"{path} is damaged: its {META} is not JSON (truncated?)"
        ) from None
    if (
        not isinstance(meta, dict)
        or meta.get("format") != FORMAT
        or not isinstance(meta.get("schema"), int)
    ):
        raise TraceError(f"{path} is not a trace: its {META} does not say {FORMAT}")
    if meta["schema"] > SCHEMA:
        raise TraceError(
            f"{path} has trace schema {meta['schema']}, and this ebbtide reads up to "
            f"{SCHEMA}: upgrade ebbtide"
        )
    return meta


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Replace meta.json in one step. Its `state` says whether tables or spools count,
    so this finishes a trace."""
    temporary = path / f"{META}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "schema": SCHEMA, **meta}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / META)


def write_rank(path: Path, rank: int, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write the tables of one rank. An optional table without rows has no file."""
    for table in TABLES:
        rows = pa.Table.from_pandas(
            tables[table], schema=arrow_schema(table), preserve_index=False
        )
        write_table(path, rank, table, [rows.replace_schema_metadata()])


def write_table(path: Path, rank: int, table: str, parts: Iterable[pa.Table]) -> None:
    """Write a table of one rank as Parquet (zstd).

    Its rows come in order, in parts.
    """
    file, schema = _parquet(path, rank, table), arrow_schema(table)
    file.parent.mkdir(exist_ok=True)
    # Times hardly repeat: a dictionary of them would only take memory.
    repeating = [
        column.name for column in TABLES[table] if not column.name.endswith("_ns")
    ]
    with contextlib.ExitStack() as stack:
        writer = None
        for rows in parts:
            if not len(rows) and table in OPTIONAL_TABLES:
                continue
            writer = writer or stack.enter_context(
                pq.ParquetWriter(
                    file, schema, compression="zstd", use_dictionary=repeating
                )
            )
            writer.write_table(rows)


def drop_ranks(path: Path, ranks: Iterable[int]) -> None:
    """Delete the tables of ranks, after some of them could not be written."""
    for rank in ranks:
        shutil.rmtree(path / f"rank-{rank}", ignore_errors=True)
    (path / f"{META}.new").unlink(missing_ok=True)


def drop_spools(path: Path) -> None:
    shutil.rmtree(path / SPOOL, ignore_errors=True)


def open_trace(path: str | Path) -> Trace:
    """Open a trace.

    One whose recording was cut off, or goes on, is read from its spools, up to their
    last complete record. One whose job has just ended is waited for until it is
    finished.

    Nothing in a trace is executed.

    Raises:
        TraceError: The path is not a trace, is damaged, or has a newer schema.
    """
    path = location(path)
    raw_meta = read_meta(path)
    meta = parse_meta(raw_meta, path)
    if meta.state == "recording":
        return _recovered(path)
    # Of a trace at a URL it would take a request each.
    for entry in [] if isinstance(path, Url) else meta.ranks:
        for table in [table for table in TABLES if table not in OPTIONAL_TABLES]:
            if not os.path.lexists(_parquet(path, entry.rank, table)):
                raise TraceError(
                    f"{path} is damaged: {_parquet(path, entry.rank, table).name} is "
                    "missing"
                )
    return complete_trace(path, raw_meta)


def _recovered(path: Path) -> Trace:
    recover = seams.plugs("recover")["spools"].load()
    if not isinstance(path, Url):
        return cast(Trace, recover(path))
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        copy = Path(folder) / path.name
        seams.service("remote-spools")(path, copy)
        trace = recover(copy)
    return Trace(path, trace.raw_meta, trace.columns)


def complete_trace(path: Path, raw_meta: dict[str, Any]) -> Trace:
    """Return a complete trace, or some ranks of one, by its metadata."""
    files = files_of(path, [entry["rank"] for entry in raw_meta["ranks"]])
    return Trace(
        path,
        raw_meta,
        lambda rank, table: _read(files, path, rank, table),
        lambda rank, table, column: _labels(files, path, rank, table, column),
    )


def _parquet(path: Path, rank: int, table: str) -> Path:
    return path / f"rank-{rank}" / f"{table}.parquet"


def _read(files: TraceFiles, path: Path, rank: int, table: str) -> Columns:
    file = _parquet(path, rank, table)
    names = [column.name for column in TABLES[table]]
    try:
        with files.open(file, names) as (source, size):
            if size <= _SMALL_BYTES:
                return _read_small(table, source.read(size))
            return _read_from(table, source, size)
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        if isinstance(error, FileNotFoundError) and table in OPTIONAL_TABLES:
            return _no_rows(table)
        raise _damaged(path, file, rank, error) from None


@lru_cache(maxsize=64)
def _read_small(table: str, content: bytes) -> Columns:
    """Return the rows of a small file. Tables without rows are equal files on all
    ranks."""
    return _read_from(table, pa.BufferReader(content), len(content))


def _read_from(table: str, source: pa.NativeFile, size: int) -> Columns:
    with _parquet_file(source, size, text_columns(table)) as parquet:
        if not parquet.metadata.num_rows:
            return _no_rows(table)
        stored = set(parquet.schema.names)
        names = [column.name for column in TABLES[table] if column.name in stored]
        if parquet.metadata.num_rows > _LARGE_ROWS:
            # Joining the row groups of all columns at once would take the memory of the
            # table twice.
            rows = pa.table(
                {
                    name: _joined(parquet.read([name], use_threads=False).column(name))
                    for name in names
                }
            )
        else:
            rows = parquet.read(names, use_threads=False)
        columns = Columns(table, typed_rows(table, rows))
    check_values(table, columns)
    return columns


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; few different texts have a byte for each row."""
    values = column.unify_dictionaries().combine_chunks()
    if pa.types.is_dictionary(values.type) and len(values.dictionary) < 1 << 7:
        return pa.DictionaryArray.from_arrays(
            values.indices.cast(pa.int8()), values.dictionary
        )
    return values


@cache
def _no_rows(table: str) -> Columns:
    return Columns(table, typed_rows(table, pa.Table.from_arrays([], [])))


def _labels(
    files: TraceFiles, path: Path, rank: int, table: str, column: str
) -> list[str]:
    """Return the different values of a text column, in order of appearance.

    Other columns are not read.
    """
    file = _parquet(path, rank, table)
    try:
        with (
            files.open(file, [column]) as (source, size),
            _parquet_file(source, size, [column]) as parquet,
        ):
            if not parquet.metadata.num_rows:
                return []
            if column not in parquet.schema.names:
                return _read(files, path, rank, table).labels(column)
            return distinct_texts(
                parquet.read([column], use_threads=False).column(column)
            )
    except (OSError, pa.ArrowException, ValueError, TypeError, KeyError) as error:
        if isinstance(error, FileNotFoundError) and table in OPTIONAL_TABLES:
            return []
        raise _damaged(path, file, rank, error) from None


@contextlib.contextmanager
def _parquet_file(
    source: pa.NativeFile, size: int, text: Sequence[str]
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of `size` bytes for reading rows.

    `text` are the columns that are text.

    `source` is a file of pyarrow, which reads it in this thread: a thread of its own
    that lets go of a file of Python while the process ends would abort it
    (apache/arrow#34314)."""
    # Text of few different values is read as a dictionary: decoding each value takes
    # three times as long.
    try:
        parquet = pq.ParquetFile(source, read_dictionary=text, pre_buffer=False)
    except KeyError:
        # Files of earlier versions lack some columns.
        names = set(pq.read_schema(source).names)
        stored = [column for column in text if column in names]
        parquet = pq.ParquetFile(source, read_dictionary=stored, pre_buffer=False)
    with parquet:
        check_size(parquet.metadata, size)
        yield parquet


def _damaged(path: Path, file: Path, rank: int, error: Exception) -> TraceError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TraceError(
        f"{path} is damaged: {file.name} of rank {rank} cannot be read ({reason})"
    )
