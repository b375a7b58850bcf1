"""Chrome traces read in pieces: the events that json.loads gives, whatever the pieces, and sense made of odd files."""

from __future__ import annotations

import gzip
import io
import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from ebbtide.errors import UserError
from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.reader import ChromeTrace

BASE = 1_700_000_000_000_000_000


def read(text: str | bytes, chunk: int = 1 << 20) -> tuple[ChromeTrace, list[Event]]:
    stream = io.BytesIO(text if isinstance(text, bytes) else text.encode())
    trace = ChromeTrace(stream, chunk)
    return trace, [event for batch in trace.batches() for event in batch]


def told(event: dict[str, Any]) -> tuple[Any, ...]:
    """What is read of an event that json.loads(parse_float=Decimal) gave."""
    ts, dur = event.get("ts"), event.get("dur", 0)
    start = None if ts is None else int(ts * 1000)
    args = event.get("args", {})
    names = ("bytes", "device", "correlation", "Sequence number", "Total Allocated")
    return event.get("cat", ""), event.get("name", ""), start, int(dur * 1000), *(args.get(n, MISSING) for n in names)


def found(event: Event) -> tuple[Any, ...]:
    start = end = None
    if event.ts is not UNSET:
        (start,), (end,) = (column.tolist() for column in spans([event]))
    length = end - start if start is not None else int(Decimal(str(event.dur)) * 1000)
    args = event.args
    told = (args.bytes, args.device, args.correlation, args.sequence, args.allocated)
    return event.cat, event.name, start, length, *told


awkward = ['}, {"', "},\n  {", "]}", '"\\', "\\u0041\\", "[{", "a" * 90, "ü\u2028😀"]
text = st.text(max_size=12) | st.sampled_from(awkward)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
whole = st.integers(0, 1 << 52)
# Microseconds with their nanoseconds: after a base as torch writes them now, and since 1970.
microseconds = whole.map(str) | st.builds("{}.{:03d}".format, st.integers(0, 18 * 10**14), st.integers(0, 999))
lengths = st.builds("{}.{:03d}".format, st.integers(0, 1 << 40), st.integers(0, 999)) | st.integers(0, 1 << 50).map(str)
args = st.fixed_dictionaries(
    {},
    optional={
        "bytes": whole, "device": st.integers(0, 8), "correlation": whole, "Sequence number": st.integers(-1, 1 << 40),
        "Total Allocated": whole, "grid": st.lists(whole, max_size=3), "odd": anything, "rows": st.just([{"a": 1}, {}]),
    },
)  # fmt: skip
names = {"ph": st.sampled_from("XiMsf"), "cat": text, "name": text, "pid": whole | text, "tid": whole, "s": anything}


@st.composite
def event_texts(draw: st.DrawFn) -> str:
    """One event as text: its times are written out, since json.dumps knows no decimals."""
    event = draw(st.fixed_dictionaries({}, optional={**names, "args": args}))
    parts = [f"{json.dumps(key)}: {json.dumps(value, **draw(styles))}" for key, value in event.items()]
    parts += [f'"ts": {draw(microseconds)}'] if draw(st.booleans()) else []
    parts += [f'"dur": {draw(lengths)}'] if draw(st.booleans()) else []
    return "{" + ", ".join(draw(st.permutations(parts))) + "}"


styles = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
metas = st.dictionaries(text.map("x{}".format), anything, max_size=2)


@st.composite
def trace_texts(draw: st.DrawFn) -> str:
    between = draw(st.sampled_from([",", ", ", ",\n  ", "\n,\n"]))
    events = "[" + between.join(draw(st.lists(event_texts(), max_size=8))) + draw(st.sampled_from(["]", "\n  ]"]))
    if draw(st.booleans()):
        return events
    known = draw(st.sampled_from([{}, {"baseTimeNanoseconds": BASE, "distributedInfo": {"rank": 3}}]))
    before, after = draw(metas), draw(metas)
    (before if draw(st.booleans()) else after).update(known)
    parts = [f"{json.dumps(key)}: {json.dumps(value, **draw(styles))}" for key, value in before.items()]
    parts.append(f'"traceEvents": {events}')
    parts += [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in after.items()]
    return "{" + ", ".join(parts) + "}"


@given(trace_texts(), st.integers(1, 400))
@example('{"traceEvents": [{"ts": 1.5, "args": {"rows": [{}, {}]}}, {"ts": 2}], "deviceProperties": [{}, {}]}', 30)
def test_any_pieces_give_the_events_of_the_whole(text: str, chunk: int) -> None:
    expected = json.loads(text, parse_float=Decimal)
    trace, events = read(text, chunk)
    listed = expected if isinstance(expected, list) else expected["traceEvents"]
    assert [found(event) for event in events] == [told(event) for event in listed]
    assert (trace.count, trace.skipped, trace.trouble) == (len(listed), 0, None)
    base = 0 if isinstance(expected, list) else expected.get("baseTimeNanoseconds", 0)
    assert trace.base_ns == base
    assert trace.meta.get("distributedInfo") == ({"rank": 3} if base else None)


@given(trace_texts(), st.integers(1, 400), st.data())
def test_what_is_cut_off_gives_the_events_before(text: str, chunk: int, data: st.DataObject) -> None:
    _, whole = read(text)
    raw = text.encode()
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    complete = sum(cut.startswith(raw[:end]) for end in _event_ends(raw))
    if not complete:
        with pytest.raises(ValueError, match=r"^it "):
            read(cut, chunk)
        return
    trace, events = read(cut, chunk)
    assert list(map(found, events)) == list(map(found, whole[:complete]))
    assert trace.trouble == "it breaks off"


def _event_ends(raw: bytes) -> list[int]:
    """Where each event ends, found with the decoder of the standard library."""
    text = raw.decode()
    at = text.index("[", text.index('"traceEvents"') if text.startswith("{") else 0) + 1
    ends = []
    decoder = json.JSONDecoder()
    while True:
        while text[at] in ", \n":
            at += 1
        if text[at] == "]":
            return ends
        _, at = decoder.raw_decode(text, at)
        ends.append(len(text[:at].encode()))


def one(event: str) -> Event:
    trace, events = read('{"traceEvents": [' + event + "]}")
    assert (len(events), trace.skipped, trace.trouble) == (1, 0, None)
    return events[0]


@pytest.mark.parametrize(
    ("ts", "ns"),
    [
        ("0", 0),
        ("12", 12_000),
        ("68.0", 68_000),
        ("4407761783790.419", 4_407_761_783_790_419),
        ("8796093022207.999", 8_796_093_022_207_999),
        ("8796093022208.001", 8_796_093_022_208_001),
        ("1712195495519689.047", 1_712_195_495_519_689_047),
        ("1661203462598738", 1_661_203_462_598_738_000),
        ("1.5e3", 1_500_000),
        ('"1712195495519689.047"', 1_712_195_495_519_689_047),
        ("-5.25", -5_250),
    ],
)
def test_times_keep_every_nanosecond(ts: str, ns: int) -> None:
    event = one(f'{{"ph": "X", "ts": {ts}, "dur": 63.813}}')
    (start,), (end,) = spans([event])
    assert (start, end) == (ns, ns + 63_813)


def test_times_that_floats_can_tell_and_others_stand_side_by_side() -> None:
    _, events = read('[{"ts": 1712195495519689.047}, {"ts": 1712195495519689}, {"ts": 2.5, "dur": 1}]')
    assert spans(events)[0].tolist() == [1_712_195_495_519_689_047, 1_712_195_495_519_689_000, 2_500]
    assert spans(events)[1].tolist()[2] == 3_500


@pytest.mark.parametrize(
    "event",
    [
        '{"ts": 1e300}',
        '{"ts": -1e300}',
        '{"ts": 1e999, "dur": 1}',
        '{"ts": 99999999999999999999999999}',
        '{"ts": 4, "dur": -1}',
        '{"ts": 4, "dur": 1e30}',
        '{"ts": "soon"}',
        '{"ts": "NaN"}',
        '{"ts": "1e9999999"}',
        '{"ts": null}',
        '{"ts": NaN}',
        '{"ts": -Infinity, "dur": 1}',
        '{"ts": [1]}',
        '{"ts": 1, "dur": {}}',
        '{"ts": true}',
        "3",
        "null",
        '"event"',
        "[[]]",
        '{"ts" 4}',
        '{"ts": 4, "deep": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"ts": ' + "9" * 10_000 + "}",
    ],
)
def test_an_event_without_a_time_that_can_be_is_skipped_and_counted(event: str) -> None:
    trace, events = read('{"traceEvents": [{"ts": 1}, ' + event + ', {"ts": 2}], "host_name": "box"}')
    assert [found.ts for found in events] == [1, 2]
    assert (trace.skipped, trace.trouble, trace.meta) == (1, None, {"host_name": "box"})


def test_what_does_not_fit_of_an_event_is_missing_and_the_rest_is_read() -> None:
    event = one('{"cat": 7, "name": "a", "ts": "5.5", "dur": 2, "args": {"bytes": "64", "device": "x", "stream": 0.5}}')
    assert (event.cat, event.name, event.ts, event.dur) == ("", "a", 5.5, 2)
    assert (event.args.bytes, event.args.device, event.args.stream) == (64, MISSING, MISSING)
    assert one('{"ts": 1, "args": "N/A"}').args == one('{"ts": 1, "args": null}').args == one('{"ts": 1}').args


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "-nan", "Infinity"])
def test_numbers_that_json_does_not_know_are_no_harm(number: str) -> None:
    event = one(f'{{"ts": 3, "name": "inf, nan", "args": {{"blocks per SM": {number}, "x": [{number}], "device": 2}}}}')
    assert (event.ts, event.args.device) == (3, 2)


def test_bytes_and_backslashes_that_json_does_not_know_are_no_harm() -> None:
    odd = [rb"C:\Users\me", b"\xff\xfe", rb"\ud800", b"a\x01\nb"]
    raw = b"[" + b",".join(b'{"ts": %d, "name": "%b"}' % (number, name) for number, name in enumerate(odd)) + b"]"
    trace, events = read(raw)
    assert [event.ts for event in events] == [0, 1, 2, 3]
    assert events[0].name == r"C:\Users\me"
    assert (trace.skipped, trace.trouble) == (0, None)
    for event in events:
        event.name.encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{}",
        b"{",
        b"[",
        b"3",
        b"null",
        b"not json",
        b"\x00\x01\x02",
        b'{"traceEvents"',
        b'{"traceEvents": 3}',
        b'{"traceEvents": [',
        b'{"traceEvents": [{"ts": 1, "name": "cut',
        b'{"traceEvents": {"ts": 1}}',
        b"{[1]: 2}",
        b'{"a": }',
        b"[:]",
        b"PK\x03\x04" * 100,
    ],
)
def test_what_is_no_trace_is_one_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it ") as error:
        read(raw, 4)
    assert "\n" not in str(error.value)


def test_no_events_are_no_trouble() -> None:
    for text in ("[]", '{"traceEvents": []}'):
        trace, events = read(text)
        assert (events, trace.trouble) == ([], None)


def test_damage_ends_the_reading_and_what_stands_before_counts() -> None:
    trace, events = read('{"traceEvents": [{"ts": 1}, {"ts": 2}: {"ts": 3}], "host_name": "box"}')
    assert [event.ts for event in events] == [1, 2]
    assert trace.trouble == "it is damaged"
    assert trace.meta == {}


def test_a_value_without_end_is_not_collected_without_end() -> None:
    trace, events = read('[{"ts": 1}, {"ts": 2, "name": "' + "x" * (20 << 20), 1 << 20)
    assert [event.ts for event in events] == [1]
    assert trace.trouble == "it has a value of more than 16 MiB"


def test_what_is_nested_without_end_is_not_followed_without_end() -> None:
    trace, events = read('[{"ts": 1}, ' + "[" * 10_000_000)
    assert [event.ts for event in events] == [1]
    assert trace.trouble == "it is nested too deeply"


def test_a_list_of_other_things_is_not_gone_through_to_its_end() -> None:
    trace, events = read('[{"ts": 1}, ' + "7, " * 20_000 + '{"ts": 2}]')
    assert [event.ts for event in events] == [1]
    assert trace.trouble == "it is damaged"


class Failing(io.BytesIO):
    """A stream that ends in an error."""

    def read1(self, size: int | None = -1, /) -> bytes:
        piece = super().read1(size)
        if not piece:
            raise UserError("the disk is gone")
        return piece


def test_what_was_read_before_the_stream_failed_counts() -> None:
    trace = ChromeTrace(Failing(b'[{"ts": 1}, {"ts": 2}, {"ts"'))
    assert [event.ts for batch in trace.batches() for event in batch] == [1, 2]
    assert trace.trouble == "the disk is gone"
    with pytest.raises(UserError, match="the disk is gone"):
        list(ChromeTrace(Failing(b'{"traceEvents": [')).batches())


def test_a_packed_stream_is_read_as_well() -> None:
    packed = gzip.compress(b'{"traceEvents": [{"ts": 1}]}')
    assert [len(batch) for batch in ChromeTrace(gzip.GzipFile(fileobj=io.BytesIO(packed))).batches()] == [1]


@given(st.binary(max_size=60), st.sampled_from([b"", b"[", b'{"traceEvents": [{"ts": 1}, ']), st.integers(1, 50))
def test_noise_is_an_error_or_events(noise: bytes, head: bytes, chunk: int) -> None:
    try:
        trace, events = read(head + noise, chunk)
    except ValueError:
        return
    assert trace.count == len(events)
