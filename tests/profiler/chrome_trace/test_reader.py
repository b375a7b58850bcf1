"""Chrome traces read in chunks: the same events as from json.loads for any chunk size,
and invalid files."""

from __future__ import annotations

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


def expected_fields(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return the expected fields of an event from json.loads(parse_float=Decimal)."""
    ts, dur = event.get("ts"), event.get("dur", 0)
    start = None if ts is None else int(ts * 1000)
    args = event.get("args", {})
    names = ("bytes", "device", "correlation", "Sequence number", "Total Allocated")
    return (
        event.get("cat", ""),
        event.get("name", ""),
        start,
        int(dur * 1000),
        *(args.get(n, MISSING) for n in names),
    )


def fields_of(event: Event) -> tuple[Any, ...]:
    start = end = None
    if event.ts is not UNSET:
        (start,), (end,) = (column.tolist() for column in spans([event]))
    length = end - start if start is not None else int(Decimal(str(event.dur)) * 1000)
    args = event.args
    numbers = (args.bytes, args.device, args.correlation, args.sequence, args.allocated)
    return event.cat, event.name, start, length, *numbers


awkward = ['}, {"', "},\n  {", "]}", '"\\', "\\u0041\\", "[{", "a" * 90, "ü\u2028😀"]
text = st.text(max_size=12) | st.sampled_from(awkward)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
    ),
    max_leaves=6,
)
whole_numbers = st.integers(0, 1 << 52)
# Microseconds with their nanoseconds: after a base as torch writes them now, and since
# 1970.
microseconds = whole_numbers.map(str) | st.builds(
    "{}.{:03d}".format, st.integers(0, 18 * 10**14), st.integers(0, 999)
)
lengths = st.builds(
    "{}.{:03d}".format, st.integers(0, 1 << 40), st.integers(0, 999)
) | st.integers(0, 1 << 50).map(str)
args = st.fixed_dictionaries(
    {},
    optional={
        "bytes": whole_numbers,
        "device": st.integers(0, 8),
        "correlation": whole_numbers,
        "Sequence number": st.integers(-1, 1 << 40),
        "Total Allocated": whole_numbers,
        "grid": st.lists(whole_numbers, max_size=3),
        "other": anything,
        "rows": st.just([{"a": 1}, {}]),
    },
)
names = {
    "ph": st.sampled_from("XiMsf"),
    "cat": text,
    "name": text,
    "pid": whole_numbers | text,
    "tid": whole_numbers,
    "s": anything,
}


@st.composite
def event_texts(draw: st.DrawFn) -> str:
    """Draw one event as text. Its times are formatted here, since json.dumps does not
    support Decimal."""
    event = draw(st.fixed_dictionaries({}, optional={**names, "args": args}))
    parts = [
        f"{json.dumps(key)}: {json.dumps(value, **draw(styles))}"
        for key, value in event.items()
    ]
    parts += [f'"ts": {draw(microseconds)}'] if draw(st.booleans()) else []
    parts += [f'"dur": {draw(lengths)}'] if draw(st.booleans()) else []
    return "{" + ", ".join(draw(st.permutations(parts))) + "}"


styles = st.sampled_from(
    [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]
)
metas = st.dictionaries(text.map("x{}".format), anything, max_size=2)


@st.composite
def trace_texts(draw: st.DrawFn) -> str:
    between = draw(st.sampled_from([",", ", ", ",\n  ", "\n,\n"]))
    events = (
        "["
        + between.join(draw(st.lists(event_texts(), max_size=8)))
        + draw(st.sampled_from(["]", "\n  ]"]))
    )
    if draw(st.booleans()):
        return events
    kept = draw(
        st.sampled_from(
            [{}, {"baseTimeNanoseconds": BASE, "distributedInfo": {"rank": 3}}]
        )
    )
    before, after = draw(metas), draw(metas)
    (before if draw(st.booleans()) else after).update(kept)
    parts = [
        f"{json.dumps(key)}: {json.dumps(value, **draw(styles))}"
        for key, value in before.items()
    ]
    parts.append(f'"traceEvents": {events}')
    parts += [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in after.items()]
    return "{" + ", ".join(parts) + "}"


@given(trace_texts(), st.integers(1, 400))
@example(
    '{"traceEvents": [{"ts": 1.5, "args": {"rows": [{}, {}]}}, {"ts": 2}], '
    '"deviceProperties": [{}, {}]}',
    30,
)
def test_batches__give_the_same_events_for_any_chunk(text: str, chunk: int) -> None:
    expected = json.loads(text, parse_float=Decimal)
    trace, events = read(text, chunk)
    listed = expected if isinstance(expected, list) else expected["traceEvents"]
    assert [fields_of(event) for event in events] == [
        expected_fields(event) for event in listed
    ]
    assert (trace.count, trace.skipped, trace.stop_reason) == (len(listed), 0, None)
    base = 0 if isinstance(expected, list) else expected.get("baseTimeNanoseconds", 0)
    assert trace.base_ns == base
    assert trace.meta.get("distributedInfo") == ({"rank": 3} if base else None)


@given(trace_texts(), st.integers(1, 400), st.data())
def test_batches__give_the_events_before_a_cut(
    text: str, chunk: int, data: st.DataObject
) -> None:
    _, all_events = read(text)
    raw = text.encode()
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    complete = sum(cut.startswith(raw[:end]) for end in _event_ends(raw))
    if not complete:
        with pytest.raises(ValueError, match=r"^it "):
            read(cut, chunk)
        return
    trace, events = read(cut, chunk)
    assert list(map(fields_of, events)) == list(map(fields_of, all_events[:complete]))
    assert trace.stop_reason == "it breaks off"


def _event_ends(raw: bytes) -> list[int]:
    """Return the end of each event, by the decoder of the standard library."""
    text = raw.decode()
    position = (
        text.index("[", text.index('"traceEvents"') if text.startswith("{") else 0) + 1
    )
    ends = []
    decoder = json.JSONDecoder()
    while True:
        while text[position] in ", \n":
            position += 1
        if text[position] == "]":
            return ends
        _, position = decoder.raw_decode(text, position)
        ends.append(len(text[:position].encode()))


def one(event: str) -> Event:
    trace, events = read('{"traceEvents": [' + event + "]}")
    assert (len(events), trace.skipped, trace.stop_reason) == (1, 0, None)
    return events[0]


TIMES = [
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
]


def test_spans__keep_every_nanosecond() -> None:
    for ts, ns in TIMES:
        event = one(f'{{"ph": "X", "ts": {ts}, "dur": 63.813}}')
        (start,), (end,) = spans([event])
        assert (start, end) == (ns, ns + 63_813)


def test_spans__mix_float_and_decimal_times() -> None:
    _, events = read(
        '[{"ts": 1712195495519689.047}, {"ts": 1712195495519689}, {"ts": 2.5, "dur": '
        "1}]"
    )
    assert spans(events)[0].tolist() == [
        1_712_195_495_519_689_047,
        1_712_195_495_519_689_000,
        2_500,
    ]
    assert spans(events)[1].tolist()[2] == 3_500


WITHOUT_TIME = [
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
]


def test_batches__skip_and_count_events_without_a_valid_time() -> None:
    for event in WITHOUT_TIME:
        trace, events = read(
            '{"traceEvents": [{"ts": 1}, ' + event + ', {"ts": 2}], "host_name": "box"}'
        )
        assert [event_read.ts for event_read in events] == [1, 2]
        assert (trace.skipped, trace.stop_reason, trace.meta) == (
            1,
            None,
            {"host_name": "box"},
        )


def test_read_event__reads_the_valid_fields_of_an_event() -> None:
    event = one(
        '{"cat": 7, "name": "a", "ts": "5.5", "dur": 2, "args": {"bytes": "64", '
        '"device": "x", "stream": 0.5}}'
    )
    assert (event.cat, event.name, event.ts, event.dur) == ("", "a", 5.5, 2)
    assert (event.args.bytes, event.args.device, event.args.stream) == (
        64,
        MISSING,
        MISSING,
    )
    assert (
        one('{"ts": 1, "args": "N/A"}').args
        == one('{"ts": 1, "args": null}').args
        == one('{"ts": 1}').args
    )


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "inf", "-nan", "Infinity"])
def test_repair_json__removes_numbers_that_are_not_json(number: str) -> None:
    event = one(
        f'{{"ts": 3, "name": "inf, nan", "args": {{"blocks per SM": {number}, "x": '
        f'[{number}], "device": 2}}}}'
    )
    assert (event.ts, event.args.device) == (3, 2)


def test_repair_json__removes_bytes_and_backslashes_that_are_not_json() -> None:
    names = [rb"C:\Users\me", b"\xff\xfe", rb"\ud800", b"a\x01\nb"]
    raw = (
        b"["
        + b",".join(
            b'{"ts": %d, "name": "%b"}' % (number, name)
            for number, name in enumerate(names)
        )
        + b"]"
    )
    trace, events = read(raw)
    assert [event.ts for event in events] == [0, 1, 2, 3]
    assert events[0].name == r"C:\Users\me"
    assert (trace.skipped, trace.stop_reason) == (0, None)
    for event in events:
        event.name.encode()


OTHER_FILES = [
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
]


def test_batches__raise_one_error_for_other_files() -> None:
    for raw in OTHER_FILES:
        with pytest.raises(ValueError, match=r"^it ") as error:
            read(raw, 4)
        assert "\n" not in str(error.value)


def test_batches__accept_a_trace_without_events() -> None:
    for text in ("[]", '{"traceEvents": []}'):
        trace, events = read(text)
        assert (events, trace.stop_reason) == ([], None)


def test_batches__stop_at_damage_and_keep_the_events_before() -> None:
    trace, events = read(
        '{"traceEvents": [{"ts": 1}, {"ts": 2}: {"ts": 3}], "host_name": "box"}'
    )
    assert [event.ts for event in events] == [1, 2]
    assert trace.stop_reason == "it has text that is not JSON"
    assert trace.meta == {}


def test_json_window__stops_at_a_value_without_end() -> None:
    trace, events = read('[{"ts": 1}, {"ts": 2, "name": "' + "x" * (20 << 20), 1 << 20)
    assert [event.ts for event in events] == [1]
    assert trace.stop_reason == "it has a value of more than 16 MiB"


def test_json_window__stops_at_endless_nesting() -> None:
    trace, events = read('[{"ts": 1}, ' + "[" * 10_000_000)
    assert [event.ts for event in events] == [1]
    assert trace.stop_reason == "it is nested too deeply"


def test_batches__stop_at_a_list_of_other_values() -> None:
    trace, events = read('[{"ts": 1}, ' + "7, " * 20_000 + '{"ts": 2}]')
    assert [event.ts for event in events] == [1]
    assert trace.stop_reason == "it has text that is not JSON"


class Failing(io.BytesIO):
    """A stream that ends in an error."""

    def read1(self, size: int | None = -1, /) -> bytes:
        block = super().read1(size)
        if not block:
            raise UserError("the disk is gone")
        return block


def test_batches__keep_events_from_before_the_stream_failed() -> None:
    trace = ChromeTrace(Failing(b'[{"ts": 1}, {"ts": 2}, {"ts"'))
    assert [event.ts for batch in trace.batches() for event in batch] == [1, 2]
    assert trace.stop_reason == "the disk is gone"
    with pytest.raises(UserError, match="the disk is gone"):
        list(ChromeTrace(Failing(b'{"traceEvents": [')).batches())


@given(
    st.binary(max_size=60),
    st.sampled_from([b"", b"[", b'{"traceEvents": [{"ts": 1}, ']),
    st.integers(1, 50),
)
def test_batches__raise_an_error_or_give_events_for_noise(
    noise: bytes, head: bytes, chunk: int
) -> None:
    try:
        trace, events = read(head + noise, chunk)
    except ValueError:
        return
    assert trace.count == len(events)
