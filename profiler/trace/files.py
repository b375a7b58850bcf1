"""The files of a trace: made once, finished atomically, never half replaced."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.profiler.trace.errors import TraceError
from ebbtide.profiler.trace.schema import FORMAT, SCHEMA, TABLES, arrow_schema

META = "meta.json"
SPOOL = "spool"


def create(path: Path, force: bool = False) -> None:
    """Make the folder of a new trace. With `force` a trace that stands there is replaced, and nothing else is.

    Raises TraceError where something is there already, or nothing can be written.
    """
    if path.exists() or path.is_symlink():
        if not force:
            raise TraceError(f"{path} exists already: choose another -o, or replace it with --force")
        if not is_trace(path):
            raise TraceError(f"{path} is not a trace: --force replaces only traces, choose another -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            os.replace(path, aside / path.name)
            path.mkdir()
            shutil.rmtree(aside)
        else:
            path.mkdir()
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from None


def is_trace(path: Path) -> bool:
    try:
        return bool(json.loads((path / META).read_bytes()).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Replace meta.json in one step. It tells which files count, so this is what makes a trace finished."""
    temporary = path / f"{META}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "schema": SCHEMA, **meta}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / META)


def write_rank(path: Path, rank: int, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write the five tables of one rank as Parquet (zstd)."""
    folder = path / f"rank-{rank}"
    folder.mkdir(exist_ok=True)
    for table in TABLES:
        rows = pa.Table.from_pandas(tables[table], schema=arrow_schema(table), preserve_index=False)
        pq.write_table(rows.replace_schema_metadata(), folder / f"{table}.parquet", compression="zstd")


def drop_ranks(path: Path, ranks: Iterable[int]) -> None:
    """Remove tables that could not all be written."""
    for rank in ranks:
        shutil.rmtree(path / f"rank-{rank}", ignore_errors=True)
    (path / f"{META}.new").unlink(missing_ok=True)


def drop_spools(path: Path) -> None:
    shutil.rmtree(path / SPOOL, ignore_errors=True)
