"""Reads pickles of plain values as a stream, and runs nothing that they ask for.

Plain values are numbers, text, lists, tuples and dicts.
"""

import struct
from array import array
from collections.abc import Callable
from typing import IO, Any, NoReturn

_CHUNK_BYTES = 1 << 20
# No value of a snapshot but a long text has more bytes in one opcode.
_MARGIN_BYTES = 1 << 12
_MAX_TEXT_BYTES = 1 << 20
_STOP, _STACK_GLOBAL, _FRAME = ord("."), 0x93, 0x95
_IMPORTS, _CALLS, _PERSISTENT = b"ci\x93", b"Rob\x81\x82\x83\x84\x92", b"PQ"


class PickleError(ValueError):
    """A file that is no pickle of plain data. The message is the reason."""


class PlainPickle:
    """Reads one pickle. A subclass may take events out as they are read.

    `objects`: those that later opcodes can refer to; `memo`: positions in them, in the
    order in which the writer numbered the objects, so that one of many numbers takes
    little memory."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file = file
        # Called with the number of bytes read so far.
        self._progress = progress
        self._read_bytes = 0
        self.data = b""
        # The next byte to read, and the end of the pickle's frame: there the next one
        # begins, or a long text.
        self.at = self._frame_end = 0
        # The values since the last mark, and those before it.
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self.objects: list[Any] = []
        self.memo = array("I")
        self._opcodes = self._handlers()

    def load(self) -> object:
        """Return the object of the pickle. Any kind of exception is raised if it is
        damaged."""
        opcodes = self._opcodes
        while True:
            if len(self.data) - self.at < _MARGIN_BYTES:
                self.refill(_MARGIN_BYTES)
            opcode = self.data[self.at] if self.at < len(self.data) else self._cut_off()
            self.at += 1
            if opcode == _STOP:
                return self.stack.pop()
            handler = opcodes[opcode]
            if handler is None:
                self._refuse(opcode)
            handler()

    def refill(self, least_bytes: int) -> None:
        """Read the next chunk, so that `least_bytes` are there if the file has them."""
        chunk = self._file.read(max(_CHUNK_BYTES, least_bytes))
        if chunk:
            self._read_bytes += len(chunk)
            self._progress(self._read_bytes)
            self._frame_end -= self.at
            self.data, self.at = self._without_frames(self.data[self.at :] + chunk), 0

    def _without_frames(self, data: bytes) -> bytes:
        """Remove the opcodes of frames that follow each other, which may be anywhere
        between two others."""
        parts, begin, end = [], 0, self._frame_end
        while 0 <= end <= len(data) - 9 and data[end] == _FRAME:
            parts.append(data[begin:end])
            begin = end + 9
            end = begin + int.from_bytes(data[end + 1 : begin], "little")
        self._frame_end = end - 9 * len(parts)
        return b"".join([*parts, data[begin:]])

    def _begin_frame(self) -> None:
        size = self._number(8)
        self._frame_end = self.at + size

    def _cut_off(self) -> NoReturn:
        raise PickleError("it is cut off")

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= _MAX_TEXT_BYTES:
            raise PickleError(f"it has a text of {count} bytes")
        if len(self.data) - self.at < count:
            self.refill(count)
        value = self.data[self.at : self.at + count]
        if len(value) < count:
            self._cut_off()
        self.at += count
        return value

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _refuse(self, opcode: int) -> NoReturn:
        if opcode in _PERSISTENT:
            raise PickleError(
                "it refers to an object outside the file, which was refused"
            )
        if opcode in _IMPORTS or opcode in _CALLS:
            lines = [
                line.decode(errors="replace")
                for line in self.data[self.at : self.at + 200].split(b"\n")[:2]
            ]
            names = (
                self.stack[-2:]
                if opcode == _STACK_GLOBAL
                else lines
                if opcode in _IMPORTS
                else ["an object"]
            )
            raise PickleError(
                f"it asks to run {'.'.join(str(name)[:50] for name in names)}, which "
                "was refused"
            )
        raise PickleError(
            f"it has the opcode {opcode:#04x}, which no memory snapshot has"
        )

    def _handlers(self) -> list[Callable[[], object] | None]:
        push = self._push
        named: dict[bytes, Callable[[], object]] = {
            b"\x80": lambda: self._take(1),
            b"\x95": self._begin_frame,
            b"N": lambda: push(None),
            b"\x88": lambda: push(True),
            b"\x89": lambda: push(False),
            b"K": lambda: push(self._number(1)),
            b"M": lambda: push(self._number(2)),
            b"J": lambda: push(self._number(4, signed=True)),
            b"\x8a": lambda: push(self._number(self._number(1), signed=True)),
            b"G": lambda: push(struct.unpack(">d", self._take(8))[0]),
            b"\x8c": lambda: push(self._text(1)),
            b"X": lambda: push(self._text(4)),
            b"\x8d": lambda: push(self._text(8)),
            b"(": self._begin,
            b"]": lambda: push([]),
            b"}": self.begin_dict,
            b")": lambda: push(()),
            b"\x85": lambda: push((self.stack.pop(),)),
            b"\x86": lambda: push(tuple(self._pop(2))),
            b"\x87": lambda: push(tuple(self._pop(3))),
            b"t": lambda: push(tuple(self._pop_mark())),
            b"a": lambda: self._extend(self._pop(1)),
            b"e": lambda: self._extend(self._pop_mark()),
            b"s": lambda: self._set_items(self._pop(2)),
            b"u": self.end_dict,
            b"\x94": lambda: self.memoize(len(self.memo)),
            b"q": lambda: self.memoize(self._number(1)),
            b"r": lambda: self.memoize(self._number(4)),
            b"h": lambda: push(self.remembered(self._number(1))),
            b"j": lambda: push(self.remembered(self._number(4))),
        }
        return [named.get(bytes([opcode])) for opcode in range(256)]

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def begin_dict(self) -> None:
        self.stack.append({})

    def end_dict(self) -> None:
        self._set_items(self._pop_mark())

    def memoize(self, index: int) -> None:
        """Remember the object on top of the stack. All writers count from zero."""
        if index != len(self.memo):
            raise PickleError(
                f"it numbers its objects in another order than pickle does ({index})"
            )
        self.memo.append(len(self.objects))
        self.objects.append(self.stack[-1])

    def remembered(self, index: int) -> Any:
        """Return the object of a number."""
        if index >= len(self.memo):
            raise PickleError(f"it refers to object {index} before it has one")
        return self.objects[self.memo[index]]

    def _text(self, size_bytes: int) -> str:
        return self._take(self._number(size_bytes)).decode("utf-8", "surrogatepass")

    def _pop(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _begin(self) -> None:
        self._outer.append(self.stack)
        self.stack = []

    def _pop_mark(self) -> list[Any]:
        """Remove what was added since the last mark."""
        values, self.stack = self.stack, self._outer.pop()
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError("not a list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        keys = values[::2]
        # A key of nested tuples would overflow the stack when it is hashed.
        if type(target) is not dict or any(type(key) is not str for key in keys):
            raise TypeError("not a dict of names")
        target.update(zip(keys, values[1::2], strict=True))
