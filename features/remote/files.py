"""Reads the files of a trace at a URL: the columns that are asked for, and no more."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from errno import ENOENT
from threading import Lock
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ebbtide.errors import TraceError, UserError
from ebbtide.features.remote.file_systems import Blob, blob
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.urls import Url

# The footers of most tables fit into this, and so do small tables.
_TAIL_BYTES = 12 << 10
# A request costs more than so many bytes between two columns.
_MAX_GAP_BYTES = 4 << 10
# Waits before a request is repeated.
_RETRIES_S = (0.25, 1.0, 4.0)
# Answers that another try does not change.
_FINAL = ("ACCESS_DENIED", "INVALID_ACCESS", "SIGNATURE", "401", "403", "NO_SUCH")
# Tables of further ranks that are fetched while one is computed.
_AHEAD = 16
_Result = TypeVar("_Result")


class RemoteFiles:
    """The files of a trace at a URL, by the URL of each.

    From the second rank of a table on, those of further ranks are fetched ahead.
    """

    def __init__(self, url: Url, ranks: Sequence[int] = ()) -> None:
        self._url = url
        self._ranks = list(ranks)
        self._fetched: dict[tuple[Url, tuple[str, ...]], Future[bytearray]] = {}
        self._read_tables: set[str] = set()
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def read(self, file: Url, max_bytes: int) -> bytes:
        """Return the contents of a file. Raises FileNotFoundError, TraceError."""

        def read() -> bytes:
            opened = blob(file)
            if opened.size() > max_bytes:
                raise TraceError(f"{file} has more than {max_bytes:,} bytes")
            contents = _part(opened, 0, opened.size())
            if not contents:
                raise OSError("it is empty")
            return contents

        return repeated(read, file)

    @contextmanager
    def open(
        self, file: Url, columns: Sequence[str]
    ) -> Iterator[tuple[pa.NativeFile, int]]:
        """Yield a table's file in memory, whose other columns are zeros, and its size.

        Raises as `read`.
        """
        contents = self._ahead(file, tuple(columns)).result()
        yield pa.BufferReader(contents), len(contents)

    def nbytes(self) -> int:
        """Return the size of the files of all ranks, taken for equal."""
        folder = self._url / f"rank-{self._ranks[0]}"
        files = [folder / f"{table}.parquet" for table in TABLES]
        return len(self._ranks) * sum(map(_size, files))

    def _ahead(self, file: Url, columns: tuple[str, ...]) -> Future[bytearray]:
        """Return a table that is being fetched, as the same one of further ranks."""
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(_AHEAD)
            files = [file]
            if file.name in self._read_tables:
                files += self._following(file)
            self._read_tables.add(file.name)
            for each in files:
                key = each, columns
                if key not in self._fetched:
                    self._fetched[key] = self._threads.submit(_fetched, each, columns)
            return self._fetched.pop((file, columns))

    def _following(self, file: Url) -> list[Url]:
        rank = int(file.parent.name.removeprefix("rank-"))
        place = self._ranks.index(rank) + 1
        folders = [f"rank-{number}" for number in self._ranks[place : place + _AHEAD]]
        return [self._url / folder / file.name for folder in folders]


def _size(file: Url) -> int:
    """Return the size of a file, 0 where there is none."""
    try:
        return repeated(lambda: blob(file).size(), file)
    except FileNotFoundError:
        return 0


def _fetched(file: Url, columns: tuple[str, ...]) -> bytearray:
    """Return a Parquet file with its footer and some columns; the rest are zeros."""
    return repeated(lambda: _sparse(blob(file), columns), file)


def _sparse(opened: Blob, columns: Sequence[str]) -> bytearray:
    size = opened.size()
    # Pages that nothing is written to take no memory.
    contents = bytearray(size)

    def fetch(begin: int, end: int) -> None:
        contents[begin:end] = _part(opened, begin, end)

    fetch(tail := max(size - _TAIL_BYTES, 0), size)
    if contents[-4:] != b"PAR1":
        raise OSError("it does not end as Parquet does")
    footer = size - 8 - int.from_bytes(contents[-8:-4], "little")
    if not tail:
        return contents
    if 0 <= footer < tail:
        fetch(footer, tail)
    fetched = min(footer, tail)
    try:
        metadata = pq.read_metadata(pa.BufferReader(contents))
    except pa.ArrowException:
        # The reader says what is wrong.
        return contents
    for begin, end in _joined(_ranges(metadata, set(columns)), fetched):
        fetch(begin, end)
    return contents


def _ranges(metadata: Any, columns: set[str]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each part of the columns."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            part = group.column(place)
            if part.path_in_schema in columns:
                begin = part.data_page_offset
                if part.has_dictionary_page:
                    begin = min(begin, part.dictionary_page_offset)
                yield begin, begin + part.total_compressed_size


def _joined(ranges: Iterator[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Return ranges up to a limit, with those joined that are close to each other."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        end = min(end, limit)
        if begin < 0 or begin >= end:
            continue
        if joined and begin - joined[-1][1] <= _MAX_GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _part(opened: Blob, begin: int, end: int) -> bytes:
    part = opened.read_at(end - begin, begin)
    if len(part) != end - begin:
        raise OSError(f"{len(part):,} bytes instead of {end - begin:,} came")
    return part


def repeated(request: Callable[[], _Result], file: Url, done: str = "read") -> _Result:
    """Return the answer of a request, which is repeated where it fails.

    Raises FileNotFoundError, and TraceError for all other failures.
    """
    for wait_s in (*_RETRIES_S, None):
        try:
            return request()
        except FileNotFoundError:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT)) from None
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            is_final = any(text in reason.upper() for text in _FINAL)
            if wait_s is None or is_final:
                raise TraceError(f"{file} cannot be {done}: {reason[:300]}") from None
            time.sleep(wait_s)
    raise AssertionError
