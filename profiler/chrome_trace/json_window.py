"""Value-by-value reading of JSON that does not fit into memory."""

from __future__ import annotations

import re
from typing import Protocol

from ebbtide.errors import UserError

# Limits for one value: real traces stay far below both.
_MAX_VALUE_BYTES = 16 << 20
_MAX_DEPTH = 100_000
_READ_BYTES = 1 << 16

# Commas are treated as spaces, and so is a byte order mark.
_SPACE = re.compile(rb"(?:[\s,]|\xef\xbb\xbf)*+")
# A bracket, or a string. A string that is not closed extends to the end of the data.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_OPENING = (b"", b'"', b"[", b"]", b"{", b"}")
_SCALAR = re.compile(rb'[^\s"\[\]{},:]+')

_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})?')
_NO_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:nan|inf(?:inity)?)(?=\s*[,\]}])", re.IGNORECASE)


class Stream(Protocol):
    """Source of bytes.

    `read1` may return fewer bytes than requested. It returns none only at the end.
    """

    def read1(self, size: int, /) -> bytes: ...


class UnreadableJson(Exception):
    """The JSON is damaged, ends too early, or has a value beyond the limits. The message gives the reason."""


class JsonWindow:
    """Window that moves over a stream of JSON.

    All methods raise UnreadableJson where the JSON is damaged or ends too early, and UserError where the stream raises
    it. Values that were complete before the error are returned first.

    Args:
        stream: The JSON text.
        chunk: Bytes to read at a time.

    Attributes:
        data: The bytes in memory.
        position: Index in `data` of the next byte to read.
    """

    def __init__(self, stream: Stream, chunk: int) -> None:
        self.data = b""
        self.position = 0
        self._stream = stream
        self._chunk = chunk
        self._error: UserError | None = None

    def extend(self) -> None:
        """Read at least one more byte: a chunk, or as many bytes as are unread if that is more.

        The window doubles, so the cost of a long value stays proportional to its length.
        """
        unread = self.data[self.position :]
        if len(unread) > _MAX_VALUE_BYTES:
            raise UnreadableJson(f"it has a value of more than {_MAX_VALUE_BYTES >> 20} MiB")
        blocks, missing = [unread], max(self._chunk, len(unread))
        while missing > 0 and (block := self._read(min(missing, _READ_BYTES))):
            blocks.append(block)
            missing -= len(block)
        if len(blocks) == 1:
            raise self._error or UnreadableJson("it breaks off")
        self.data, self.position = b"".join(blocks), 0

    def _read(self, size: int) -> bytes:
        try:
            return b"" if self._error else self._stream.read1(size)
        except UserError as error:
            self._error = error
            return b""

    def peek(self) -> bytes:
        """Return the next byte that is neither space nor comma, without consuming it."""
        while self.skip_separators() == len(self.data):
            self.extend()
        return self.data[self.position : self.position + 1]

    def skip_separators(self) -> int:
        """Move to the next byte in the window that is neither space nor comma, and return its position."""
        self.position = _SPACE.match(self.data, self.position).end()  # type: ignore[union-attr]
        return self.position

    def expect(self, byte: bytes) -> None:
        """Consume the next byte. Raise UnreadableJson if it is not `byte`."""
        if self.peek() != byte:
            raise UnreadableJson("it is damaged")
        self.position += 1

    def next_value(self) -> bytes:
        """Consume the next value and return its text."""
        self.peek()
        while (value := self.buffered_value()) is None:
            self.extend()
        return value

    def buffered_value(self) -> bytes | None:
        """Consume the next value if all of it is in the window.

        Returns:
            The text of the value; `]` or `}` at the end of a list or object; None if more data is needed.
        """
        begin = self.skip_separators()
        end = _value_end(self.data, begin)
        if end is None:
            return None
        self.position = end
        return self.data[begin:end]


def _value_end(data: bytes, begin: int) -> int | None:
    """Return the end of the value that begins at `begin`, or None if `data` does not contain it."""
    if data[begin : begin + 1] not in _OPENING:
        scalar = _SCALAR.match(data, begin)
        if scalar is None:
            raise UnreadableJson("it is damaged")
        return scalar.end() if scalar.end() < len(data) else None
    depth = 0
    for token in _TOKEN.finditer(data, begin):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
        elif token.end() == len(data):
            return None
        if depth <= 0:
            return token.end()
        if depth > _MAX_DEPTH:
            raise UnreadableJson("it is nested too deeply")
    return None


def repair_json(text: bytes) -> bytes:
    """Turn nearly valid JSON into valid JSON.

    Repairs bytes that are not UTF-8, NaN and infinities, single backslashes and bare control characters. Strings may
    lose such characters.
    """
    repaired = _CONTROL.sub(" ", text.decode("utf-8", "replace"))
    repaired = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", repaired)
    return _NO_NUMBER.sub("null", repaired).encode()
