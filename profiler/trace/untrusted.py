"""Opens the files of a trace, here or at a URL, within bounds, as they may come from
anybody.

The bounds are on which files there are, how large, and which values they hold."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbtide import seams
from ebbtide.profiler.trace.schema import TABLES
from ebbtide.urls import Url

if TYPE_CHECKING:
    from ebbtide.profiler.trace.columns import Columns

# A rank takes about 1 kB of meta.json.
MAX_META_BYTES = 32 << 20
# Tables that people record take up to 12 times their file in memory. Below the floor
# nothing is refused.
_MAX_RATIO = 200
_FLOOR_BYTES = 64 << 20
_VALUE_BYTES = 8
# Ten years: times are relative to one recording.
_MAX_SPAN_NS = 10 * 366 * 86_400 * 10**9
_MAX_TIME_NS = 1 << 62
_MAX_BYTES = 1 << 50
# Iterations, streams and the like.
_MAX_NUMBER = 1 << 53
# Streams are pointers in some traces.
_ANY_NUMBER = ("stream", "thread", "throttle_reasons")


def open_regular(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `max_bytes` that is not a link.

    Never wait for another process.

    Raises:
        OSError: It is none, or cannot be opened.
    """
    descriptor = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "not a regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(None, f"{status.st_size:,} bytes, more than {max_bytes:,}")
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file that is not a link, of at most `max_bytes`.

    Raises OSError as `open_regular`.
    """
    with open_regular(path, max_bytes) as file:
        return file.read(max_bytes)


class TraceFiles(Protocol):
    """The files of a trace, by the path of each."""

    def read(self, file: Path, max_bytes: int) -> bytes:
        """Return the contents of a file. Raises OSError where it has more bytes, is no
        regular file, or cannot be read."""

    def open(
        self, file: Path, columns: Sequence[str]
    ) -> AbstractContextManager[tuple[pa.NativeFile, int]]:
        """Open a Parquet file to read some of its columns; give its size, too."""

    def nbytes(self) -> int:
        """Return the size of the files of the ranks."""


class _LocalFiles:
    """The files of a trace in a folder."""

    def __init__(self, path: Path, ranks: Sequence[int]) -> None:
        self._path, self._ranks = path, ranks

    def read(self, file: Path, max_bytes: int) -> bytes:
        return read_regular(file, max_bytes)

    @contextmanager
    def open(
        self, file: Path, columns: Sequence[str]
    ) -> Iterator[tuple[pa.NativeFile, int]]:
        with (
            open_regular(file) as opened,
            pa.OSFile(f"/dev/fd/{opened.fileno()}") as source,
        ):
            yield source, os.fstat(opened.fileno()).st_size

    def nbytes(self) -> int:
        folders = [
            folder
            for rank in self._ranks
            if os.path.isdir(folder := f"{self._path}/rank-{rank}")
        ]
        return sum(
            file.stat(follow_symlinks=False).st_size
            for folder in folders
            for file in os.scandir(folder)
        )


def files_of(path: Path, ranks: Sequence[int] = ()) -> TraceFiles:
    """Return the files of a trace with some ranks.

    Raises UserError where the feature that reads URLs is not there.
    """
    if not isinstance(path, Url):
        return _LocalFiles(path, ranks)
    files: TraceFiles = seams.service("remote-files")(path, ranks)
    return files


def check_size(metadata: Any, file_bytes: int) -> None:
    """Check the memory that a Parquet file says it will take, before it is read.

    `metadata` is its footer.

    Raises ValueError where that is out of proportion to the file."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    stored = sum(
        group.column(number).total_uncompressed_size
        for group in groups
        for number in range(group.num_columns)
    )
    needed = max(stored, metadata.num_rows * metadata.num_columns * _VALUE_BYTES)
    if (
        needed > max(_FLOOR_BYTES, _MAX_RATIO * file_bytes)
        or min(stored, metadata.num_rows) < 0
    ):
        raise ValueError(
            f"{metadata.num_rows:,} rows would take {needed:,} bytes, in a file of "
            f"{file_bytes:,}"
        )


# Returns the numbers of an integer column, and which of them are recorded.
Numbers = Callable[[str], "tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]"]


def check_values(table: str, columns: Columns) -> None:
    """Check the integers of a table. Raises ValueError for a value that no recording
    has.

    Sampled rates may be impossible: drivers report such values, and analyses leave them
    out."""
    if len(columns):
        for reason, _ in flaws(
            table, lambda name: (columns.ints(name), columns.recorded(name))
        ):
            raise ValueError(reason)


def flaws(
    table: str, numbers: Numbers, typical_ns: int | None = None
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yield each reason to refuse rows of a table, and which rows it is about.

    Readers refuse the whole trace, and imports leave these rows out. `typical_ns`: a
    time near all others; None: the time of the row in the middle.
    """
    names = [
        column.name for column in TABLES[table] if pa.types.is_integer(column.type)
    ]
    for name in names:
        values, recorded = numbers(name)
        own = values[recorded]
        if name in _ANY_NUMBER or not len(own):
            continue
        least, most = int(own.min()), int(own.max())
        middle = int(own[len(own) // 2]) if typical_ns is None else typical_ns
        low, high = _limits(name, middle)
        if least < low or most > high:
            outside = recorded & ((values < low) | (values > high))
            yield _reason(name, least, most), outside
    if "end_ns" in names:
        (starts, _), (ends, ended) = numbers("start_ns"), numbers("end_ns")
        if (early := ended & (ends < starts)).any():
            yield "something ends before it starts", early
    if table == "iteration_marks":
        marked, _ = numbers("iteration")
        late = marked <= np.maximum.accumulate(np.append(-1, marked))[:-1]
        if late.any():
            yield "its iterations do not ascend", late


def _limits(name: str, typical_ns: int) -> tuple[int, int]:
    """Return the least and the largest value of a column."""
    if name == "window_ns":
        return 0, _MAX_SPAN_NS
    if name.endswith("_ns"):
        earliest, latest = typical_ns - _MAX_SPAN_NS, typical_ns + _MAX_SPAN_NS
        return max(earliest, -_MAX_TIME_NS), min(latest, _MAX_TIME_NS)
    least = -1 if name == "parent" else 0
    return least, _MAX_BYTES if name == "bytes" else _MAX_NUMBER


def _reason(name: str, least: int, most: int) -> str:
    if name.endswith("_ns"):
        return f"its times {name} span {(most - least) / 1e9:,.0f} s"
    return f"its column {name} has values from {least:,} to {most:,}"
