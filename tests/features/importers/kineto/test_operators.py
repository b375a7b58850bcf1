"""The operator that launched each kernel of a Kineto trace, against searches through
all ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.profiler.chrome_trace.host_ranges import innermost
from tests.conftest import examples
from tests.features.importers.kineto.made_kineto import (
    import_files,
    iteration,
    launched,
    span,
    write_trace,
)


def operator_names(path: Path) -> list[str | None]:
    column = import_files(path).kernels(0)["operator"].astype(object)
    return [None if pd.isna(name) else str(name) for name in column]


def test_operators__are_the_innermost_ranges_around_the_launches(
    tmp_path: Path,
) -> None:
    ranges = [
        span("aten::linear", 12, 20, "cpu_op"),
        span("aten::addmm", 13, 16, "cpu_op"),
        span("aten::relu", 22, 24, "cpu_op"),
        {**span("aten::mm", 12, 30, "cpu_op"), "tid": 2},
        span("aten::empty", 25, 25, "cpu_op"),
    ]
    launches = [14, 17, 25, 39, 100.5]
    work = [
        event
        for n, at in enumerate(launches)
        for event in launched(at, 200 + n, 200.5 + n, n + 1)
    ]
    elsewhere = launched(28, 206, 207, 9)
    elsewhere[0]["tid"] = 2
    path = write_trace(
        tmp_path / "run.json",
        [*iteration(1, 0), *ranges, *work, *elsewhere, span("x", 1, 2, "kernel")],
    )
    assert operator_names(path) == [
        None,
        "aten::addmm",
        "aten::linear",
        "forward",
        None,
        None,
        "aten::mm",
    ]


def test_operators__are_not_known_where_the_host_was_not_recorded(
    tmp_path: Path,
) -> None:
    path = write_trace(
        tmp_path / "run.json",
        [event for n in range(3) for event in launched(n, n + 5, n + 6, n + 1)],
    )
    trace = import_files(path)
    assert trace.kernels(0)["operator"].isna().all()
    assert TraceAnalysis(trace).activity(0).operators == []


@st.composite
def nested_ranges(
    draw: st.DrawFn, begin: int = 0, end: int = 60, depth: int = 0
) -> list[tuple[int, int]]:
    """Return ranges of one thread that are nested or disjoint, with shared ends and
    empty ones."""
    points = sorted(draw(st.lists(st.integers(begin, end), min_size=2, max_size=5)))
    ranges = list(zip(points[::2], points[1::2], strict=False))
    inner = [
        nested
        for own in ranges
        if depth < 2
        for nested in draw(nested_ranges(*own, depth=depth + 1))
    ]
    return ranges + inner


@settings(max_examples=examples(50), deadline=None)
@given(
    threads=st.lists(nested_ranges(), min_size=1, max_size=3), seed=st.integers(0, 999)
)
def test_innermost__is_the_shortest_range_of_the_thread_around_a_time(
    threads: list[list[tuple[int, int]]], seed: int
) -> None:
    listed = [(*own, number) for number, ranges in enumerate(threads) for own in ranges]
    rows = pd.DataFrame(listed, columns=["start", "end", "thread"]).sample(
        frac=1, random_state=seed
    )
    starts, ends, own_threads = rows.to_numpy(np.int64).T
    times = np.tile(np.arange(62), len(threads) + 1)
    of_thread = np.repeat(np.arange(-1, len(threads)), 62)
    for row, time, thread in zip(
        innermost(rows, times, of_thread), times, of_thread, strict=True
    ):
        around = np.flatnonzero(
            (own_threads == thread) & (starts <= time) & (time < ends)
        )
        assert (row >= 0) == bool(len(around))
        if len(around):
            assert row in around
            assert (ends - starts)[row] == (ends - starts)[around].min()
