"""Opens packed files and archives as streams, without writing anything to a disk.

Limits guard against files that unpack without end.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from ebbtide.errors import UserError

# Real traces shrink by a factor of 10 to 50. A file that shrinks more than this was
# made to fill a disk.
_MAX_RATIO = 400
# The ratio is not checked for files that unpack to less than this.
_UNCHECKED_BYTES = 64 << 20
_MAX_LAYERS = 3
_MAX_MEMBERS = 10_000
_BUFFER_BYTES = 1 << 16
_ZIP, _TAR, _TAR_OFFSET = b"PK\x03\x04", b"ustar", 257
_ERRORS = (
    OSError, EOFError, RuntimeError, ValueError, zlib.error,
    lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException,
)  # fmt: skip
# Escape sequences of terminals: colours, cursors, titles.
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_MAX_ESCAPE_BYTES = 64


def _zstd(file: IO[bytes]) -> IO[bytes]:
    stream: IO[bytes] = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    return stream


# The first bytes of packed files, and what reads their contents.
_CODECS: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"\x28\xb5\x2f\xfd", _zstd),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)


def open_unpacked(
    path: Path, member: str | None, damaged: Callable[[object], UserError]
) -> io.BufferedReader:
    """Open the contents of a file, or of a member of an archive, as bytes in UTF-8.

    Reading raises what `damaged` returns for contents that are damaged or unpack to
    too much.
    """
    raw = open(path, "rb")  # noqa: SIM115
    file: io.BufferedReader = raw
    for _ in range(_MAX_LAYERS):
        head = file.peek(512)
        codec = next((make for magic, make in _CODECS if head.startswith(magic)), None)
        try:
            if codec is not None:
                layer = _Limited(codec(file), raw.tell, damaged, file)
            elif member is not None and file is raw and head.startswith(_ZIP):
                archive = zipfile.ZipFile(raw)
                packed = archive.getinfo(member).compress_size
                layer = _Limited(archive.open(member), lambda: packed, damaged, raw)  # noqa: B023
            elif member is not None and _is_tar(head):
                layer = _Limited(_tar_member(file, member), None, damaged, file)
                member = None
            else:
                break
        except (*_ERRORS, KeyError) as error:
            raise damaged(error) from None
        file = io.BufferedReader(layer, _BUFFER_BYTES)
    encoding = _utf16(file.peek(512)[:512])
    if encoding is None:
        return file
    return io.BufferedReader(_Transcoded(file, encoding), _BUFFER_BYTES)


def archive_members(path: Path, damaged: Callable[[object], UserError]) -> list[str]:
    """Return the names of the files in an archive; none if the file is no archive."""
    with open_unpacked(path, None, damaged) as file:
        head = file.peek(512)
        try:
            if _is_tar(head):
                with tarfile.open(fileobj=file, mode="r|") as archive:
                    return _visible(m.name for m in archive if m.isfile())
            if head.startswith(_ZIP):
                with zipfile.ZipFile(path) as packed:
                    entries = packed.infolist()
                    return _visible(e.filename for e in entries if not e.is_dir())
        except _ERRORS as error:
            raise damaged(error) from None
    return []


def _visible(names: Iterator[str]) -> list[str]:
    members = list(islice(names, _MAX_MEMBERS + 1))
    if len(members) > _MAX_MEMBERS:
        raise ValueError(f"it has more than {_MAX_MEMBERS:,} files")
    # Systems put files of their own into archives.
    return [name for name in members if not name.startswith((".", "__MACOSX"))]


def _is_tar(head: bytes) -> bool:
    return head[_TAR_OFFSET : _TAR_OFFSET + len(_TAR)] == _TAR


def _tar_member(file: IO[bytes], member: str) -> IO[bytes]:
    archive = tarfile.open(fileobj=file, mode="r|")  # noqa: SIM115
    for entry in archive:
        if entry.name == member and entry.isfile():
            contents = archive.extractfile(entry)
            assert contents is not None
            return contents
    raise KeyError(member)


def _utf16(head: bytes) -> str | None:
    """Return the encoding of text in UTF-16, with or without a byte order mark."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    first, second = head[::2], head[1::2]
    for encoding, zeros, text in (
        ("utf-16-le", second, first),
        ("utf-16-be", first, second),
    ):
        if len(text) > 1 and not any(zeros) and all(9 <= c < 127 for c in text):
            return encoding
    return None


class _Stream(io.RawIOBase):
    """A stream over another one, which it closes."""

    def __init__(self, stream: IO[bytes], *others: Any) -> None:
        self._stream = stream
        self._others = others
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        # A block may become empty, which would mean the end.
        while not self._rest:
            block = self._stream.read(len(buffer))
            self._rest = self.convert(block)
            if not block:
                break
        chunk, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def convert(self, block: bytes) -> bytes:
        """Return the contents of a block; of an empty one what is left at the end."""
        raise NotImplementedError

    def close(self) -> None:
        for stream in (self._stream, *self._others):
            stream.close()
        super().close()


class _Limited(_Stream):
    """Unpacked contents, up to a plausible ratio to the packed bytes."""

    def __init__(
        self,
        stream: IO[bytes],
        packed_bytes: Callable[[], int] | None,
        damaged: Callable[[object], UserError],
        file: IO[bytes],
    ) -> None:
        super().__init__(stream, file)
        self._packed_bytes, self._damaged = packed_bytes, damaged
        self._unpacked_bytes = 0

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            read = getattr(self._stream, "read1", self._stream.read)
            chunk: bytes = read(len(buffer))
        except _ERRORS as error:
            raise self._damaged(error) from None
        self._unpacked_bytes += len(chunk)
        if (
            self._packed_bytes is not None
            and self._unpacked_bytes > _UNCHECKED_BYTES
            and self._unpacked_bytes > _MAX_RATIO * self._packed_bytes()
        ):
            raise self._damaged(
                f"it unpacks to more than {_MAX_RATIO} times its size (unpack it if "
                "that is right)"
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)


class _Transcoded(_Stream):
    """Text in UTF-16 as UTF-8."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        super().__init__(stream)
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")

    def convert(self, block: bytes) -> bytes:
        return self._decoder.decode(block, not block).encode("utf-8", "replace")


class PlainText(_Stream):
    """Text without the NUL bytes of holes, and without escape sequences of
    terminals."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._cut = b""

    def convert(self, block: bytes) -> bytes:
        text = self._cut + block.replace(b"\0", b"")
        self._cut = b""
        if b"\x1b" in text:
            # A sequence may go on in the next block.
            begin = text.rfind(b"\x1b") if block else len(text)
            if len(text) - begin < _MAX_ESCAPE_BYTES:
                text, self._cut = text[:begin], text[begin:]
            text = _ESCAPES.sub(b"", text)
        return text
