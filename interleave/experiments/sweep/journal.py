"""Keeps the finished rows of a sweep in a file next to the output until all are finished."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import IO

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.task import Row


def journal_path(output: Path) -> Path:
    """Return the path of the journal of an output file."""
    return output.with_name(f"{output.name}.unfinished")


class Journal:
    """A file of JSON lines, one per finished row with the key of its task.

    A row survives the end of this process as soon as `add` returns. An incomplete line is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        """Open the file. Raises UserError if it cannot be written."""
        try:
            self._file = self._path.open("a+b", buffering=0)
            # An incomplete last line of an earlier run must not spoil the first line of this one.
            if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            if not self._path.stat().st_size:
                self._path.unlink()

    def rows(self) -> dict[str, Row]:
        """Return the finished rows by the keys of their tasks."""
        rows = {}
        for json_line in self._path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(json_line)
                rows[str(entry["key"])] = dict(entry["row"])
        return rows

    def add(self, key: str, row: Row) -> None:
        """Append a finished row. Raises UserError if the disk is full."""
        assert self._file is not None
        try:
            self._file.write(json.dumps({"key": key, "row": row}).encode() + b"\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from None

    def delete(self) -> None:
        """Delete the file, once all rows are in the output."""
        self._path.unlink(missing_ok=True)
