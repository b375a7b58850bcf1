"""Reads columns of SQLite databases that others made, without executing what is in
them."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from ebbtide.features.importers.source import Source, SourceError

MAGIC = b"SQLite format 3\0"
_CHUNK_ROWS = 1 << 16
# Longer texts are cut: names of kernels with deeply nested templates.
_MAX_CHARS = 4096
# No value and no statement of an export is larger.
_MAX_VALUE_BYTES = 1 << 26
# A row takes at least this many bytes. A damaged file may lead in circles, and would
# have rows without end.
_MIN_ROW_BYTES = 3


@contextmanager
def open_database(source: Source) -> Iterator[Database]:
    """Open a database for reading, unpacked if needed. Raises SourceError if it is
    damaged, also from the body."""
    with ExitStack() as stack:
        try:
            with source.path.open("rb") as file:
                is_plain = file.read(len(MAGIC)) == MAGIC
            path = source.path if is_plain else _unpack(source, stack)
            size = path.stat().st_size
            _check_complete(source, size)
            uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
            connection = sqlite3.connect(uri, uri=True)
            stack.callback(connection.close)
            yield Database(connection, source, size)
        # Messages of SQLite quote names in the file, which may not be text.
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise source.damaged(error) from None
        except OSError as error:
            raise SourceError(
                f"{source} cannot be read: {error.strerror or error}"
            ) from None


def _unpack(source: Source, stack: ExitStack) -> Path:
    """Unpack a file to a temporary one, which is removed with the stack."""
    unpacked = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".sqlite"))  # noqa: SIM115
    with source.open() as file:
        shutil.copyfileobj(file, unpacked)
    unpacked.flush()
    return Path(unpacked.name)


def _check_complete(source: Source, size: int) -> None:
    """Raise SourceError if the file is shorter than its header states."""
    page_bytes = int.from_bytes(source.head[16:18], "big")
    pages = int.from_bytes(source.head[28:32], "big")
    stated = pages * (1 << 16 if page_bytes == 1 else page_bytes)
    if size < stated:
        raise source.damaged(
            f"it is cut off ({size} of {stated} bytes): export it again"
        )


class Database:
    """Tables of a database, read-only. Only stored tables are read: a view, a virtual
    table or a computed column would execute what the file says."""

    def __init__(
        self, connection: sqlite3.Connection, source: Source, size: int
    ) -> None:
        self._connection = connection
        self._source = source
        self._max_rows = size // _MIN_ROW_BYTES
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        stored = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        self.tables = frozenset(
            name for (name,) in connection.execute(stored) if isinstance(name, str)
        )
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Return the names of the stored columns of a table; empty if there is no such
        table."""
        if table not in self._columns:
            rows = (
                self._connection.execute(f"PRAGMA table_xinfo({_quoted(table)})")
                if table in self.tables
                else ()
            )
            # The last field is not 0 for columns that are computed or hidden.
            self._columns[table] = frozenset(row[1] for row in rows if row[6] == 0)
        return self._columns[table]

    def integers(
        self, table: str, required: Sequence[str], optional: Mapping[str, int]
    ) -> pd.DataFrame:
        """Read integer columns of a table, in the order of its rows.

        There are none if there is no such table. `required` columns have a value in
        every row; `optional` ones may be missing or null, and then have their value.
        """
        names = [*required, *optional]
        if table not in self.tables:
            return pd.DataFrame(np.empty((0, len(names)), np.int64), columns=names)
        columns = self.columns(table)
        missing = [name for name in required if name not in columns]
        if missing:
            raise self._source.damaged(f"the table {table} has no column {missing[0]}")
        selected = [_quoted(name) for name in required]
        selected += [
            f"ifnull({_quoted(name)}, {value})" if name in columns else str(value)
            for name, value in optional.items()
        ]
        blocks = [np.empty((0, len(names)), np.int64)]
        for rows in self._chunks(table, selected):
            block = np.array(rows)
            if block.dtype != np.int64:
                raise self._source.damaged(
                    f"the table {table} has values that are not integers"
                )
            blocks.append(block)
        return pd.DataFrame(np.concatenate(blocks), columns=names)

    def texts(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of columns that are text or null, in the table's order.

        There are none without such a table, and null stands for a column that the table
        lacks. Raises SourceError for a value that is neither text nor a number.
        """
        if table in self.tables:
            stored = self.columns(table)
            names = [
                f"substr({_quoted(name)}, 1, {_MAX_CHARS})"
                if name in stored
                else "NULL"
                for name in columns
            ]
            for rows in self._chunks(table, names):
                if not all(
                    value is None or isinstance(value, str)
                    for row in rows
                    for value in row
                ):
                    raise self._source.damaged(
                        f"the table {table} has texts that are not text"
                    )
                yield from rows

    def labels(self, table: str, key: str, value: str) -> Iterator[tuple[int, str]]:
        """Yield the pairs of a table that maps integers to texts. Raises SourceError
        for values of another type."""
        if table in self.tables:
            for rows in self._chunks(
                table, [_quoted(key), f"substr({_quoted(value)}, 1, {_MAX_CHARS})"]
            ):
                for number, text in rows:
                    if not isinstance(number, int) or not isinstance(text, str):
                        raise self._source.damaged(
                            f"the table {table} has values of the wrong type"
                        )
                    yield number, text

    def _chunks(
        self, table: str, selected: Sequence[str]
    ) -> Iterator[list[tuple[Any, ...]]]:
        cursor = self._connection.execute(
            f"SELECT {', '.join(selected)} FROM {_quoted(table)} NOT INDEXED"
        )
        count = 0
        while rows := cursor.fetchmany(_CHUNK_ROWS):
            count += len(rows)
            if count > self._max_rows:
                raise self._source.damaged(
                    f"the table {table} has more rows than the file can hold"
                )
            yield rows


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
