"""Tests that events have one meaning for every reader."""

from __future__ import annotations

import itertools
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbtide.features.export import trace_events
from ebbtide.features.export.trace_events import microseconds
from ebbtide.profiler.trace import TraceBuilder
from tests.features.export.trace_event_file import (
    check,
    export_and_read,
    rows,
    slices,
    values_of,
)

BROKEN = [
    '{"ph":"X","pid":1,"tid":2,"ts":0,"dur":-1,"cat":"c","name":"n","args":{}}',
    '{"ph":"X","pid":1,"tid":2,"ts":"0","dur":1,"cat":"c","name":"n","args":{}}',
    '{"ph":"X","pid":"1","tid":2,"ts":0,"dur":1,"cat":"c","name":"n","args":{}}',
    '{"ph":"X","pid":1,"tid":3,"ts":0,"dur":1,"cat":"c","name":"n","args":{}}',
    '{"ph":"X","pid":1,"tid":2,"ts":5,"dur":9,"cat":"c","name":"n","args":{}}',
    '{"ph":"C","pid":1,"ts":0,"name":"n","args":{}}',
    '{"ph":"C","pid":1,"ts":0,"name":"n","args":{"v":null}}',
    '{"ph":"C","pid":1,"ts":0,"name":"n","args":{"v":NaN}}',
    '{"ph":"M","pid":1,"name":"thread_name","args":{"name":"n"}}',
    '{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"again"}}',
    '{"ph":"s","pid":1,"tid":2,"ts":0,"id":1,"cat":"c","name":"n"}',
    '{"ph":"s","pid":1,"tid":2,"ts":3,"id":1,"cat":"c","name":"n"},'
    '{"ph":"f","bp":"e","pid":1,"tid":2,"ts":0,"id":1,"cat":"c","name":"n"}',
    '{"ph":"B","pid":1,"tid":2,"ts":0,"name":"n"}',
]


def test_check__finds_broken_events() -> None:
    for broken in BROKEN:
        valid = [
            '{"ph":"M","pid":1,"name":"process_name","args":{"name":"p"}}',
            '{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"t"}}',
            '{"ph":"X","pid":1,"tid":2,"ts":0,"dur":10.5,"cat":"c","name":"n","args":{}}',
        ]
        head = '{"displayTimeUnit":"ns","baseTimeNanoseconds":0,"otherData":{},"traceEvents":['
        check(f"{head}{','.join(valid)}]}}")
        with pytest.raises((AssertionError, KeyError)):
            check(f"{head}{','.join([*valid, broken])}]}}")


@example(1118)  # 1 + 0.118 is a little less than 1.118
@given(st.integers(0, 10**13) | st.integers(0, 10**6))
def test_microseconds__are_exact_for_every_reader(time: int) -> None:
    (text,) = microseconds(np.array([time]))
    assert abs(Decimal(text) * 1000 - time) <= Decimal("0.1")
    assert round(float(text) * 1000) == time
    # As current and earlier readers of Perfetto do it.
    assert int(float(text) * 1000) == time
    integer, _, fraction = text.partition(".")
    assert int((int(integer) + int(fraction) / 10 ** len(fraction)) * 1000) == time


def test_slices__that_touch_do_not_overlap_in_perfetto(tmp_path: Path) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0)
    edges = np.cumsum(np.random.default_rng(0).integers(1, 10**9, 3000)).tolist()
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        rank.phase("forward", start, end, number)
    file = export_and_read(builder.build(), tmp_path / "x.json")
    assert len(slices(file, "iteration")) == 2999


def test_slices__of_many_rows_are_written_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "_CHUNK", 7)
    builder = TraceBuilder()
    start = np.arange(100) * 10
    builder.rank(0).extend(
        "transfers",
        start_ns=start,
        end_ns=start + 15,
        device="cuda:0",
        direction="h2d",
        bytes=start + 1,
        name="copy",
    )
    trace = builder.build()
    file = export_and_read(trace, tmp_path / "x.json")
    columns = ("start_ns", "end_ns", "bytes")
    assert values_of(slices(file, "copy"), *columns) == rows(
        trace.transfers(0), *columns
    )


def test_name_events__replace_invalid_unicode(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:0", "name": 'a "card"\n\ud800 ü 🌊'}])
    file = export_and_read(builder.build(), tmp_path / "x.json")
    assert file["traceEvents"][0]["args"]["name"] == 'rank 0 · a "card"\n? ü 🌊'
