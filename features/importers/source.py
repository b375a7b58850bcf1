"""Opens the files to import, packed or not, as bytes or as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from ebbtide.errors import UserError
from ebbtide.features.importers.unpacking import (
    PlainText,
    archive_members,
    open_unpacked,
)

_HEAD_BYTES = 1 << 16
# Bytes of text, and the share of others up to which contents are text.
_TEXT_BYTES = bytes({*range(32, 256), *b"\t\n\r\f\b\x1b\0"})
_MAX_OTHER_SHARE = 0.01

_Parsed = TypeVar("_Parsed")


class SourceError(UserError):
    """A file that cannot be imported."""


def members_of(path: Path) -> list[str]:
    """Return the names of the files in an archive; none for any other file."""
    try:
        return archive_members(path, lambda reason: SourceError(str(reason)))
    except (OSError, SourceError):
        return []  # `Source` says what is wrong with it.


class Source:
    """A readable file to import, maybe packed, or a file in an archive.

    `member`: its name in the archive, None for the only one. `head` is its first
    64 KiB, unpacked. Raises SourceError if it is not readable.
    """

    def __init__(self, path: Path, member: str | None = None) -> None:
        self.path = path
        self._member = member
        self._parsed: dict[Callable[[Source], Any], Any] = {}
        try:
            if path.is_dir():
                raise SourceError(f"{path} is a folder: name the files in it")
            if path.exists() and not path.is_file():
                raise SourceError(
                    f"{path} is a pipe or a device: it is read more than once, so "
                    "write it to a file first"
                )
            if member is None:
                self._member = self._only_member()
            with self.open() as file:
                self.head = file.read(_HEAD_BYTES)
        except OSError as error:
            raise SourceError(self._unreadable(error)) from None
        if not self.head:
            raise SourceError(f"{path} is empty")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk, packed if the file is packed."""
        return self.path.stat().st_size

    @property
    def is_text(self) -> bool:
        """Whether the contents begin with text, or with a hole."""
        return len(self.head.translate(None, _TEXT_BYTES)) <= _MAX_OTHER_SHARE * len(
            self.head
        )

    @cached_property
    def head_text(self) -> str:
        """The first 64 KiB of the text; empty if the file is not text."""
        if not self.is_text:
            return ""
        with self.open_text() as file:
            return file.read(_HEAD_BYTES).decode("utf-8-sig", "replace")

    def open(self) -> io.BufferedReader:
        """Open the unpacked contents. Reading raises SourceError if they are damaged or
        unpack to too much."""
        return open_unpacked(self.path, self._member, self.damaged)

    def open_text(self) -> IO[bytes]:
        """Open the contents as text in UTF-8, without holes and without the escape
        sequences of terminals."""
        return io.BufferedReader(PlainText(self.open()), _HEAD_BYTES)

    def text(self) -> io.TextIOWrapper:
        """Open the contents as text. Bytes that are not UTF-8 become replacement
        characters."""
        return io.TextIOWrapper(
            self.open_text(), encoding="utf-8-sig", errors="replace"
        )

    def _only_member(self) -> str | None:
        members = archive_members(self.path, self.damaged)
        if len(members) > 1:
            raise SourceError(
                f"{self.path} has {len(members):,} files: unpack it, and name its files"
            )
        return members[0] if members else None

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
