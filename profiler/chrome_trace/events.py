"""Decoding of Chrome trace events, tolerant of invalid fields."""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ebbtide.profiler.chrome_trace.int_table import IntArray
from ebbtide.profiler.chrome_trace.json_window import repair_json

MISSING = -1
# A base (up to the year 2043), a time (up to 2112) and a duration add up to less than 64 bits of nanoseconds. A float
# of microseconds is exact to the nanosecond only up to _MAX_FLOAT_US.
MAX_BASE_NS, _MAX_US, _MAX_DURATION_US, _MAX_FLOAT_US = 1 << 61, 1 << 52, 1 << 50, float(1 << 43)

_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_WholeUs = Annotated[int, msgspec.Meta(ge=-_MAX_US, le=_MAX_US)]
_FloatUs = Annotated[float, msgspec.Meta(ge=-_MAX_FLOAT_US, le=_MAX_FLOAT_US)]
_WholeDurationUs = Annotated[int, msgspec.Meta(ge=0, le=_MAX_DURATION_US)]
_FloatDurationUs = Annotated[float, msgspec.Meta(ge=0, le=_MAX_FLOAT_US)]


class Args(msgspec.Struct, gc=False, frozen=True):
    """The fields of an event's `args` that are read. MISSING: the event does not have the field."""

    bytes: _Whole = MISSING
    device: _Whole = MISSING
    stream: _Whole = MISSING
    correlation: _Whole = MISSING
    sequence: _Whole = msgspec.field(name="Sequence number", default=MISSING)
    allocated: _Whole = msgspec.field(name="Total Allocated", default=MISSING)
    reserved: _Whole = msgspec.field(name="Total Reserved", default=MISSING)
    address: _Whole = msgspec.field(name="Addr", default=MISSING)
    size: _Whole = msgspec.field(name="Bytes", default=0)
    device_type: _Whole = msgspec.field(name="Device Type", default=MISSING)
    device_id: _Whole = msgspec.field(name="Device Id", default=MISSING)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event of a Chrome trace.

    Attributes:
        cat: Category, such as `kernel` or `cpu_op`.
        name: Name.
        ts: Start in microseconds after the trace's base; UNSET if the event has no time. `spans` converts to ns.
        dur: Duration in microseconds.
        tid: Thread: a number, or the name of a stream; None if the event has none.
        args: The fields of `args` that are read.
    """

    cat: str = ""
    name: str = ""
    ts: _WholeUs | _FloatUs | UnsetType = UNSET
    dur: _WholeDurationUs | _FloatDurationUs = 0
    tid: Any = None
    args: Args = Args()


class _ExactEvent(Event, gc=False, frozen=True):
    """Event with decimal times, for Unix times whose nanoseconds no float can represent."""

    ts: Decimal | UnsetType = UNSET  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


# The second decoder is slower. It is used where the first rejects a time with too many digits.
_DECODERS: tuple[msgspec.json.Decoder[Any], ...] = (
    msgspec.json.Decoder(list[Event]),
    msgspec.json.Decoder(list[_ExactEvent]),
)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ArithmeticError)
_fields = cache(msgspec.structs.fields)


def read_events(text: bytes) -> list[Event] | None:
    """Decode events separated by commas. Return None if one of them is invalid and cannot be repaired."""
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
    return (event.ts is UNSET or abs(event.ts) <= _MAX_US) and 0 <= event.dur <= _MAX_DURATION_US


def read_event(text: bytes) -> Event | None:
    """Decode one event with those of its fields that are valid. Return None if its time is invalid."""
    events = read_events(text)
    if events:
        return events[0]
    values = read_value(text)
    if not isinstance(values, dict):
        return None
    fields = _valid_fields(Event, values)
    if ("ts" in values and "ts" not in fields) or ("dur" in values and "dur" not in fields):
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
                valid[field.name] = msgspec.convert(values[field.encode_name], field.type, strict=False)
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
    """Return the (start, end) of events in ns after the trace's base, exactly. Every event must have a `ts`."""
    start = _nanoseconds([event.ts for event in events])
    return start, start + _nanoseconds([event.dur for event in events])


def _nanoseconds(microseconds: list[Any]) -> IntArray:
    us = np.array(microseconds)
    if us.dtype == object:  # Decimals
        return np.array([round(Decimal(value) * 1000) for value in microseconds], np.int64)
    whole_us = np.floor(us)
    ns: IntArray = whole_us.astype(np.int64) * 1000 + np.rint((us - whole_us) * 1000).astype(np.int64)
    return ns
