"""Decoding of Chrome trace events, tolerant of invalid fields."""

import re
from decimal import Decimal
from functools import cache
from io import BufferedIOBase
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import UNSET, UnsetType

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
_NO_NUMBER = re.compile(
    r"(?<=[:,\[\s])-?(?:nan|inf(?:inity)?)(?=\s*[,\]}])", re.IGNORECASE
)
# A base (up to the year 2043), a time (up to 2112) and a duration add up to less than
# 64 bits of nanoseconds. A float of microseconds is exact to the nanosecond only up to
# _MAX_FLOAT_US.
MAX_BASE_NS, _MAX_US, _MAX_DURATION_US, _MAX_FLOAT_US = (
    1 << 61,
    1 << 52,
    1 << 50,
    float(1 << 43),
)


class UnreadableJson(Exception):
    """The JSON is damaged, ends too early, or has a value beyond the limits. The
    message gives the reason."""


class JsonWindow:
    """Window that moves over a stream of JSON. All methods raise UnreadableJson where
    the JSON is damaged or ends too early, after what was complete before, and UserError
    where the stream raises it."""

    def __init__(self, stream: BufferedIOBase, chunk: int) -> None:
        self.data = b""
        self.position = 0
        self._stream = stream
        self._chunk = chunk
        self._error: UserError | None = None

    def extend(self) -> None:
        """Read a chunk, or as many bytes as are unread.

        The cost of a long value grows with its length alone.
        """
        unread = self.data[self.position :]
        if len(unread) > _MAX_VALUE_BYTES:
            raise UnreadableJson(
                f"it has a value of more than {_MAX_VALUE_BYTES >> 20} MiB"
            )
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
        """Return the next byte that is not space or comma, without consuming it."""
        while self.skip_separators() == len(self.data):
            self.extend()
        return self.data[self.position : self.position + 1]

    def skip_separators(self) -> int:
        """Move to the next byte that is not space or comma, and return its position.

        The position is in the window.
        """
        self.position = _SPACE.match(self.data, self.position).end()  # type: ignore[union-attr]
        return self.position

    def expect(self, byte: bytes) -> None:
        """Consume the next byte. Raise UnreadableJson if it is not `byte`."""
        if self.peek() != byte:
            raise UnreadableJson("it has text that is not JSON")
        self.position += 1

    def next_value(self) -> bytes:
        """Consume the next value and return its text."""
        self.peek()
        while (value := self.buffered_value()) is None:
            self.extend()
        return value

    def buffered_value(self) -> bytes | None:
        """Consume the next value if all of it is in the window, and return its text.

        Return `]` or `}` at the end of a list or object, and None if more data is
        needed.
        """
        begin = self.skip_separators()
        end = _value_end(self.data, begin)
        if end is None:
            return None
        self.position = end
        return self.data[begin:end]


def _value_end(data: bytes, begin: int) -> int | None:
    """Return the end of the value that begins at `begin`.

    Return None if `data` does not contain it.
    """
    if data[begin : begin + 1] not in _OPENING:
        scalar = _SCALAR.match(data, begin)
        if scalar is None:
            raise UnreadableJson("it has text that is not JSON")
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
    """Turn nearly valid JSON into valid JSON: bytes that are not UTF-8, NaN and
    infinities, single backslashes and bare control characters, which strings may
    lose."""
    repaired = _CONTROL.sub(" ", text.decode("utf-8", "replace"))
    repaired = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else r"\\", repaired)
    return _NO_NUMBER.sub("null", repaired).encode()


IntArray = npt.NDArray[np.int64]
MISSING = -1
_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_WholeUs = Annotated[int, msgspec.Meta(ge=-_MAX_US, le=_MAX_US)]
_FloatUs = Annotated[float, msgspec.Meta(ge=-_MAX_FLOAT_US, le=_MAX_FLOAT_US)]
_WholeDurationUs = Annotated[int, msgspec.Meta(ge=0, le=_MAX_DURATION_US)]
_FloatDurationUs = Annotated[float, msgspec.Meta(ge=0, le=_MAX_FLOAT_US)]
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ArithmeticError)
_fields = cache(msgspec.structs.fields)


class IntTable:
    """Table of int64 columns that grows by blocks and takes 8 bytes per value.

    Blocks consist of rows.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._blocks = [np.empty((0, len(names)), np.int64)]

    def add(self, *columns: npt.ArrayLike) -> None:
        self._blocks.append(np.column_stack(columns))

    def table(self) -> pd.DataFrame:
        """Return all rows so far. Do not change them."""
        # One block afterwards: the small ones would double the memory.
        self._blocks = [np.concatenate(self._blocks)]
        return pd.DataFrame(self._blocks[0], columns=[*self._names])


class Args(msgspec.Struct, gc=False, frozen=True):
    """The fields of an event's `args` that are read. MISSING: the event does not have
    the field."""

    bytes: _Whole = MISSING
    device: _Whole = MISSING
    stream: _Whole = MISSING
    queue: _Whole = msgspec.field(name="sycl queue", default=MISSING)
    stream_id: _Whole = msgspec.field(name="Stream Id", default=MISSING)
    task_stream: _Whole = msgspec.field(name="Physic Stream Id", default=MISSING)
    task: Any = msgspec.field(name="Task Type", default=None)
    connection: _Whole = msgspec.field(name="connection_id", default=MISSING)
    correlation: _Whole = MISSING
    sequence: _Whole = msgspec.field(name="Sequence number", default=MISSING)
    forward_thread: _Whole = msgspec.field(name="Fwd thread id", default=MISSING)
    allocated: _Whole = msgspec.field(name="Total Allocated", default=MISSING)
    reserved: _Whole = msgspec.field(name="Total Reserved", default=MISSING)
    address: _Whole = msgspec.field(name="Addr", default=MISSING)
    size: _Whole = msgspec.field(name="Bytes", default=0)
    device_type: _Whole = msgspec.field(name="Device Type", default=MISSING)
    device_id: _Whole = msgspec.field(name="Device Id", default=MISSING)
    awaited_stream: _Whole = msgspec.field(name="wait_on_stream", default=MISSING)
    record: _Whole = msgspec.field(
        name="wait_on_cuda_event_record_corr_id", default=MISSING
    )
    collective: Any = msgspec.field(name="Collective name", default=None)
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event of a Chrome trace."""

    cat: str = ""
    name: str = ""
    # Start in microseconds after the trace's base; UNSET if the event has no time.
    # `spans` converts to ns.
    ts: _WholeUs | _FloatUs | UnsetType = UNSET
    dur: _WholeDurationUs | _FloatDurationUs = 0
    # Thread: a number, or the name of a stream; None if the event has none.
    tid: Any = None
    args: Args = Args()
    pid: Any = None  # Process: a number, or the number of a device.


class _ExactEvent(Event, gc=False, frozen=True):
    """Event with decimal times, for Unix times too exact for a float.

    No float can represent their nanoseconds.
    """

    ts: Decimal | UnsetType = UNSET  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


# The second decoder is slower. It is used where the first rejects a time with too many
# digits.
_DECODERS: tuple[msgspec.json.Decoder[Any], ...] = (
    msgspec.json.Decoder(list[Event]),
    msgspec.json.Decoder(list[_ExactEvent]),
)


def read_events(text: bytes) -> list[Event] | None:
    """Decode events separated by commas. Return None if one of them is invalid and
    cannot be repaired."""
    for prepare in (bytes, repair_json):
        json_list = b"[" + prepare(text) + b"]"
        for decoder in _DECODERS:
            try:
                events: list[Event] = decoder.decode(json_list)
                if decoder is _DECODERS[0] or all(map(_has_valid_times, events)):
                    return events
            except _UNREADABLE:
                continue
    return None


def _has_valid_times(event: Event) -> bool:
    return (
        event.ts is UNSET or abs(event.ts) <= _MAX_US
    ) and 0 <= event.dur <= _MAX_DURATION_US


def read_event(text: bytes) -> Event | None:
    """Decode one event, with its valid fields alone.

    Return None if its time is invalid.
    """
    events = read_events(text)
    if events:
        return events[0]
    values = read_value(text)
    if not isinstance(values, dict):
        return None
    fields = _valid_fields(Event, values)
    if ("ts" in values and "ts" not in fields) or (
        "dur" in values and "dur" not in fields
    ):
        return None
    if isinstance(values.get("args"), dict):
        fields["args"] = Args(**_valid_fields(Args, values["args"]))
    return Event(**fields)


def _valid_fields(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `kind` whose values are valid or can be converted."""
    valid = {}
    for field in _fields(kind):
        if field.encode_name in values:
            try:
                valid[field.name] = msgspec.convert(
                    values[field.encode_name], field.type, strict=False
                )
            except (msgspec.ValidationError, ValueError, OverflowError):
                continue
    return valid


def read_value(text: bytes) -> Any:
    """Decode any JSON value. Return None if it cannot be read."""
    for prepare in (bytes, repair_json):
        try:
            return msgspec.json.decode(prepare(text))
        except _UNREADABLE:
            continue
    return None


def spans(events: list[Event]) -> tuple[IntArray, IntArray]:
    """Return the (start, end) of events in ns after the trace's base, exactly. Every
    event must have a `ts`."""
    start = _nanoseconds([event.ts for event in events])
    return start, start + _nanoseconds([event.dur for event in events])


def _nanoseconds(microseconds: list[Any]) -> IntArray:
    us = np.array(microseconds)
    if us.dtype == object:  # Decimals
        return np.array(
            [round(Decimal(value) * 1000) for value in microseconds], np.int64
        )
    whole_us = np.floor(us)
    ns: IntArray = whole_us.astype(np.int64) * 1000 + np.rint(
        (us - whole_us) * 1000
    ).astype(np.int64)
    return ns
