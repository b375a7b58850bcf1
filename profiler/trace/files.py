"""The files of a trace: made once, finished atomically, never half replaced."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.schema import FORMAT, SCHEMA, TABLES, arrow_schema

META = "meta.json"
SPOOL = "spool"


@contextlib.contextmanager
def new_trace(path: Path, force: bool = False) -> Iterator[None]:
    """Make the folder of a new trace, for the block to fill. With `force` a trace that stands there is replaced, and
    nothing else is. If the block raises, all is as it was: nothing is left, and what was replaced stands again.

    Raises TraceError where something is there already, or nothing can be written.
    """
    taken = os.path.lexists(path)
    if taken and not force:
        raise TraceError(f"{path} exists already: choose another path, or replace it (--force, force=True)")
    if taken and not is_trace(path):
        raise TraceError(f"{path} is not a trace: --force replaces only traces, choose another -o")
    new_folders = [parent for parent in path.parents if not os.path.exists(parent)]
    aside: Path | None = None
    made = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if taken:
            aside = Path(tempfile.mkdtemp(prefix=".ebbtide-", dir=path.parent))
            os.replace(path, aside / "old")
        path.mkdir()
        made = True
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(path, ignore_errors=True)
        _undo(path, aside, new_folders)
        if isinstance(error, OSError):
            raise TraceError(f"cannot write {path}: {error.strerror or error}") from None
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _undo(path: Path, aside: Path | None, new_folders: list[Path]) -> None:
    if aside is not None:
        if os.path.lexists(aside / "old"):
            os.replace(aside / "old", path)
        aside.rmdir()
    for folder in new_folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def is_trace(path: Path) -> bool:
    try:
        return bool(json.loads((path / META).read_bytes()).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError, RecursionError):
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
