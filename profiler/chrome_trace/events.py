"""The events of Chrome traces, from text that may be odd: as much of them as can be read."""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ebbtide.profiler.chrome_trace.int_table import Ints
from ebbtide.profiler.chrome_trace.json_window import mended

MISSING = -1
# The sum of a base (up to the year 2043), a time (up to 2112) and a duration fits into 64 bits of nanoseconds; and a
# float tells every nanosecond only up to so many microseconds.
MOST_BASE_NS, _MOST_US, _LONGEST_US, _FLOAT_US = 1 << 61, 1 << 52, 1 << 50, float(1 << 43)

_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_WholeUs = Annotated[int, msgspec.Meta(ge=-_MOST_US, le=_MOST_US)]
_FloatUs = Annotated[float, msgspec.Meta(ge=-_FLOAT_US, le=_FLOAT_US)]
_WholeLength = Annotated[int, msgspec.Meta(ge=0, le=_LONGEST_US)]
_FloatLength = Annotated[float, msgspec.Meta(ge=0, le=_FLOAT_US)]


class Args(msgspec.Struct, gc=False, frozen=True):
    """What is wanted of an event's `args`; MISSING what it does not tell."""

    bytes: _Whole = MISSING
    device: _Whole = MISSING
    stream: _Whole = MISSING
    correlation: _Whole = MISSING
    sequence: _Whole = msgspec.field(name="Sequence number", default=MISSING)
    allocated: _Whole = msgspec.field(name="Total Allocated", default=MISSING)
    reserved: _Whole = msgspec.field(name="Total Reserved", default=MISSING)
    device_type: _Whole = msgspec.field(name="Device Type", default=MISSING)
    device_id: _Whole = msgspec.field(name="Device Id", default=MISSING)


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event. `ts` (UNSET where it has none) and `dur` are microseconds after the trace's base: see `spans`."""

    cat: str = ""
    name: str = ""
    ts: _WholeUs | _FloatUs | UnsetType = UNSET
    dur: _WholeLength | _FloatLength = 0
    args: Args = Args()


class _Exact(Event, gc=False, frozen=True):
    """For Unix times in decimals: no float can tell their nanoseconds."""

    ts: Decimal | UnsetType = UNSET  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


# The second is asked where the first finds a time that is too long for it.
_DECODERS: tuple[msgspec.json.Decoder[Any], ...] = (
    msgspec.json.Decoder(list[Event]),
    msgspec.json.Decoder(list[_Exact]),
)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ArithmeticError)
_fields = cache(msgspec.structs.fields)


def read_events(text: bytes) -> list[Event] | None:
    """Events with commas between them; None where one of them is odd beyond mending."""
    for attempt in (bytes, mended):
        listed = b"[" + attempt(text) + b"]"
        for decoder in _DECODERS:
            try:
                events: list[Event] = decoder.decode(listed)
                if decoder is _DECODERS[0] or all(map(_possible, events)):
                    return events
            except _UNREADABLE:
                continue
    return None


def _possible(event: Event) -> bool:
    return (event.ts is UNSET or abs(event.ts) <= _MOST_US) and 0 <= event.dur <= _LONGEST_US


def read_event(text: bytes) -> Event | None:
    """One event, with those of its fields that fit; None where its time does not."""
    events = read_events(text)
    if events:
        return events[0]
    found = read_value(text)
    if not isinstance(found, dict):
        return None
    event = _fitting(Event, found)
    if ("ts" in found and "ts" not in event) or ("dur" in found and "dur" not in event):
        return None
    if isinstance(found.get("args"), dict):
        event["args"] = Args(**_fitting(Args, found["args"]))
    return Event(**event)


def _fitting(kind: type[msgspec.Struct], found: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind` that `found` has and that fit, or can be made to."""
    fitting = {}
    for field in _fields(kind):
        if field.encode_name in found:
            try:
                fitting[field.name] = msgspec.convert(found[field.encode_name], field.type, strict=False)
            except (msgspec.ValidationError, ValueError, OverflowError):
                continue
    return fitting


def read_value(text: bytes) -> Any:
    """Any JSON; None where it cannot be read."""
    for attempt in (bytes, mended):
        try:
            return msgspec.json.decode(attempt(text))
        except _UNREADABLE:
            continue
    return None


def spans(events: list[Event]) -> tuple[Ints, Ints]:
    """(start, end) of events, ns after the trace's base, exactly. They must have a `ts`."""
    start = _nanoseconds([event.ts for event in events])
    return start, start + _nanoseconds([event.dur for event in events])


def _nanoseconds(microseconds: list[Any]) -> Ints:
    us = np.array(microseconds)
    if us.dtype == object:  # Decimals
        return np.array([round(Decimal(value) * 1000) for value in microseconds], np.int64)
    whole = np.floor(us)
    ns: Ints = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
    return ns
