"""JSON that is too large to hold, value by value: a window that moves over a stream of bytes."""

from __future__ import annotations

import re
from typing import Protocol

from ebbtide.errors import UserError

# No value of a trace that makes sense is larger, or deeper.
_MOST = 16 << 20
_DEEPEST = 100_000
_PIECE = 1 << 16

# Commas are as good as spaces here, and a byte order mark too.
_SPACE = re.compile(rb"(?:[\s,]|\xef\xbb\xbf)*+")
# A string, which runs to the end of the data where it is not closed, or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_OPENING = (b"", b'"', b"[", b"]", b"{", b"}")
_SCALAR = re.compile(rb'[^\s"\[\]{},:]+')

_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})?')
_NO_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:nan|inf(?:inity)?)(?=\s*[,\]}])", re.IGNORECASE)


class Stream(Protocol):
    """Bytes to read; `read1` may give fewer than asked for, and none only at the end."""

    def read1(self, size: int, /) -> bytes: ...


class BrokenOff(Exception):
    """Why no more can be read."""


class Window:
    """The bytes `data[at:]` of a stream are next. All methods raise BrokenOff where the JSON ends too early or is none,
    and UserError where the stream does; what was read before that is given out first."""

    def __init__(self, stream: Stream, chunk: int) -> None:
        self.data = b""
        self.at = 0
        self._stream = stream
        self._chunk = chunk
        self._error: UserError | None = None

    def more(self) -> None:
        """Read on: at least one byte, and as much again as is here already, so that long values cost no more."""
        rest = self.data[self.at :]
        if len(rest) > _MOST:
            raise BrokenOff(f"it has a value of more than {_MOST >> 20} MiB")
        pieces, wanted = [rest], max(self._chunk, len(rest))
        while wanted > 0 and (piece := self._read(min(wanted, _PIECE))):
            pieces.append(piece)
            wanted -= len(piece)
        if len(pieces) == 1:
            raise self._error or BrokenOff("it breaks off")
        self.data, self.at = b"".join(pieces), 0

    def _read(self, size: int) -> bytes:
        try:
            return b"" if self._error else self._stream.read1(size)
        except UserError as error:
            self._error = error
            return b""

    def peek(self) -> bytes:
        """The next byte that is neither space nor comma."""
        while self.skip() == len(self.data):
            self.more()
        return self.data[self.at : self.at + 1]

    def skip(self) -> int:
        """Go on to the next byte of the window that is neither space nor comma. Returns where it is."""
        self.at = _SPACE.match(self.data, self.at).end()  # type: ignore[union-attr]
        return self.at

    def expect(self, byte: bytes) -> None:
        if self.peek() != byte:
            raise BrokenOff("it is damaged")
        self.at += 1

    def value(self) -> bytes:
        """The next value, taken out of the stream."""
        self.peek()
        while (value := self.whole()) is None:
            self.more()
        return value

    def whole(self) -> bytes | None:
        """The next value where all of it is in the window, else None; `]` or `}` where a list or an object ends."""
        begin = self.skip()
        end = _end(self.data, begin)
        if end is None:
            return None
        self.at = end
        return self.data[begin:end]


def _end(data: bytes, begin: int) -> int | None:
    """Where the value that begins at `begin` ends; None where that is not in `data`."""
    if data[begin : begin + 1] not in _OPENING:
        scalar = _SCALAR.match(data, begin)
        if scalar is None:
            raise BrokenOff("it is damaged")
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
        if depth > _DEEPEST:
            raise BrokenOff("it is nested too deeply")
    return None


def mended(text: bytes) -> bytes:
    """JSON in place of what is nearly JSON: with bytes that are no UTF-8, NaN and infinities, lone backslashes or bare
    control characters. Strings may lose such characters."""
    repaired = _CONTROL.sub(" ", text.decode("utf-8", "replace"))
    repaired = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", repaired)
    return _NO_NUMBER.sub("null", repaired).encode()
