"""Opens and unpacks the files to import.

Limits guard against files that unpack without end.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from ebbtide.errors import UserError

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 1 << 16
# Real traces shrink by a factor of 10 to 50. A file that shrinks more than this was
# made to fill a disk.
_MAX_RATIO = 400
# The ratio is not checked for files that unpack to less than this.
_UNCHECKED_BYTES = 64 << 20

_Parsed = TypeVar("_Parsed")


class SourceError(UserError):
    """A file that cannot be imported."""


class Source:
    """A readable file to import, maybe packed with gzip.

    `head` is its first 64 KiB, unpacked. Raises SourceError if it is not readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parsed: dict[Callable[[Source], Any], Any] = {}
        try:
            if path.is_dir():
                raise SourceError(f"{path} is a folder: name the files in it")
            if path.exists() and not path.is_file():
                raise SourceError(
                    f"{path} is a pipe or a device: it is read more than once, so "
                    "write it to a file first"
                )
            with self.open() as file:
                self.head = file.read(_HEAD_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(self._unreadable(error)) from None
        if not self.head:
            raise SourceError(f"{path} is empty")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk, packed if the file is packed."""
        return self.path.stat().st_size

    def open(self) -> IO[bytes]:
        """Open the unpacked contents. Reading raises SourceError if they are damaged or
        unpack to too much."""
        file = open(self.path, "rb")  # noqa: SIM115
        packed = file.peek(2)[:2] == _GZIP
        return io.BufferedReader(_Unpacked(self, file), _HEAD_BYTES) if packed else file

    def text(self) -> io.TextIOWrapper:
        """Open the contents as text. Bytes that are not UTF-8 become replacement
        characters."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", errors="replace")

    def parsed(self, parse: Callable[[Source], _Parsed]) -> _Parsed:
        """Return `parse(self)`, called only once per file.

        Two importers may need the result.
        """
        if parse not in self._parsed:
            self._parsed[parse] = parse(self)
        result: _Parsed = self._parsed[parse]
        return result

    def damaged(self, reason: object) -> SourceError:
        """Return the error for contents that do not have the expected format."""
        short_reason = " ".join(str(reason).split())[:200]
        return SourceError(
            f"{self.path} is damaged or in another format: {short_reason}"
        )

    def _unreadable(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"{self.path} does not exist"
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else error
        )
        return f"{self.path} cannot be read: {reason}"


class _Unpacked(io.RawIOBase):
    """Contents of a gzip file. Reading raises SourceError if it unpacks to more than a
    plausible size."""

    def __init__(self, source: Source, file: io.BufferedReader) -> None:
        self._source = source
        self._file = file
        self._gzip = gzip.GzipFile(fileobj=file)
        self._unpacked_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            chunk = self._gzip.read1(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise self._source.damaged(error) from None
        self._unpacked_bytes += len(chunk)
        if (
            self._unpacked_bytes > _UNCHECKED_BYTES
            and self._unpacked_bytes > _MAX_RATIO * self._file.tell()
        ):
            raise self._source.damaged(
                f"it unpacks to more than {_MAX_RATIO} times its size (gunzip it if "
                "that is right)"
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()
