"""Rows that are finished, kept beside the output until all are."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import IO

from ebbtide.errors import UserError
from ebbtide.interleave.experiments.sweep.task import Row


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.unfinished")


class Journal:
    """A file of JSON lines, one per row, under the key of its question. A row is there as soon as `add` returns,
    whatever then happens to this process. A line that was cut off is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        """Raises UserError where it cannot be written."""
        try:
            self._file = self._path.open("a+b", buffering=0)
            # A line that the last run could not finish must not take this run's first one with it.
            if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            if not self._path.stat().st_size:
                self._path.unlink()

    def rows(self) -> dict[str, Row]:
        """What is finished, by key."""
        found = {}
        for line in self._path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                found[str(entry["key"])] = dict(entry["row"])
        return found

    def add(self, key: str, row: Row) -> None:
        """Raises UserError where the disk is full."""
        assert self._file is not None
        try:
            self._file.write(json.dumps({"key": key, "row": row}).encode() + b"\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from None

    def drop(self) -> None:
        """All rows have found their place."""
        self._path.unlink(missing_ok=True)
