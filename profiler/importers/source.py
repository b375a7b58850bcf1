"""The files that are imported: opened, unpacked, and kept from growing without end."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO

from ebbtide.errors import UserError

_GZIP = b"\x1f\x8b"
_HEAD = 1 << 16
# Real traces shrink 10 to 50 times; what shrinks more than this was made to fill a disk.
_MOST_RATIO = 400
_FREE_BYTES = 64 << 20


class SourceError(UserError):
    """A file that cannot be imported."""


class Source:
    """A file that somebody wants imported. Raises SourceError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_dir():
                raise SourceError(f"{path} is a folder: name the files in it")
            if path.exists() and not path.is_file():
                raise SourceError(
                    f"{path} is a pipe or a device: it is read more than once, so write it to a file first"
                )
            with self.open() as file:
                self.head = file.read(_HEAD)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(self._unreadable(error)) from None
        if not self.head:
            raise SourceError(f"{path} is empty")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk, packed where it is."""
        return self.path.stat().st_size

    def open(self) -> IO[bytes]:
        """The file's bytes, unpacked. Reading raises SourceError where they are damaged or grow beyond reason."""
        file = open(self.path, "rb")  # noqa: SIM115
        packed = file.peek(2)[:2] == _GZIP
        return io.BufferedReader(_Unpacked(self, file), _HEAD) if packed else file

    def text(self) -> io.TextIOWrapper:
        """Its lines; bytes that are no UTF-8 become replacement characters."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", errors="replace")

    def _unreadable(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"{self.path} does not exist"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return f"{self.path} cannot be read: {reason}"

    def damaged(self, why: object) -> SourceError:
        """The error for contents that are not what the file claims to be."""
        reason = " ".join(str(why).split())[:200]
        return SourceError(f"{self.path} is damaged or not what it seems: {reason}")


class _Unpacked(io.RawIOBase):
    """A gzip file that stops where it unpacks to more than is believable."""

    def __init__(self, source: Source, file: io.BufferedReader) -> None:
        self._source = source
        self._file = file
        self._gzip = gzip.GzipFile(fileobj=file)
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            chunk = self._gzip.read1(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise self._source.damaged(error) from None
        self._read += len(chunk)
        if self._read > _FREE_BYTES and self._read > _MOST_RATIO * self._file.tell():
            raise self._source.damaged(
                f"it unpacks to more than {_MOST_RATIO} times its size (gunzip it if that is right)"
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()
