"""The operator that launched each kernel of a Kineto trace, against searches through all ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.profiler.chrome_trace.host_ranges import innermost
from tests.conftest import examples, slow_case
from tests.features.importers.kineto.made_kineto import events, import_files, iteration, launched, span, write_trace
from tests.features.importers.kineto.test_kernels import PUBLISHED


def operator_names(path: Path) -> list[str | None]:
    column = import_files(path).kernels(0)["operator"].astype(object)
    return [None if pd.isna(name) else str(name) for name in column]


def test_operators__are_the_innermost_ranges_around_the_launches(tmp_path: Path) -> None:
    ranges = [
        span("aten::linear", 12, 20, "cpu_op"),
        span("aten::addmm", 13, 16, "cpu_op"),
        span("aten::relu", 22, 24, "cpu_op"),
        {**span("aten::mm", 12, 30, "cpu_op"), "tid": 2},
        span("aten::empty", 25, 25, "cpu_op"),
    ]
    launches = [14, 17, 25, 39, 100.5]
    work = [event for n, at in enumerate(launches) for event in launched(at, 200 + n, 200.5 + n, n + 1)]
    elsewhere = launched(28, 206, 207, 9)
    elsewhere[0]["tid"] = 2
    path = write_trace(tmp_path / "run.json", [*iteration(1, 0), *ranges, *work, *elsewhere, span("x", 1, 2, "kernel")])
    assert operator_names(path) == [None, "aten::addmm", "aten::linear", "forward", None, None, "aten::mm"]


def test_operators__are_not_known_where_the_host_was_not_recorded(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.json", [event for n in range(3) for event in launched(n, n + 5, n + 6, n + 1)])
    trace = import_files(path)
    assert trace.kernels(0)["operator"].isna().all()
    assert TraceAnalysis(trace).activity(0).operators == []


@st.composite
def nested_ranges(draw: st.DrawFn, begin: int = 0, end: int = 60, depth: int = 0) -> list[tuple[int, int]]:
    """Return ranges of one thread that are nested or disjoint, with shared ends and empty ones."""
    points = sorted(draw(st.lists(st.integers(begin, end), min_size=2, max_size=5)))
    ranges = list(zip(points[::2], points[1::2], strict=False))
    inner = [nested for own in ranges if depth < 2 for nested in draw(nested_ranges(*own, depth=depth + 1))]
    return ranges + inner


@settings(max_examples=examples(50), deadline=None)
@given(threads=st.lists(nested_ranges(), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_innermost__is_the_shortest_range_of_the_thread_around_a_time(
    threads: list[list[tuple[int, int]]], seed: int
) -> None:
    listed = [(*own, number) for number, ranges in enumerate(threads) for own in ranges]
    rows = pd.DataFrame(listed, columns=["start", "end", "thread"]).sample(frac=1, random_state=seed)
    starts, ends, own_threads = rows.to_numpy(np.int64).T
    times = np.tile(np.arange(62), len(threads) + 1)
    of_thread = np.repeat(np.arange(-1, len(threads)), 62)
    for row, time, thread in zip(innermost(rows, times, of_thread), times, of_thread, strict=True):
        around = np.flatnonzero((own_threads == thread) & (starts <= time) & (time < ends))
        assert (row >= 0) == bool(len(around))
        if len(around):
            assert row in around
            assert (ends - starts)[row] == (ends - starts)[around].min()


@pytest.mark.parametrize("name", [slow_case("control.json.gz"), "sampled_rank-0.json.gz"])
def test_operators__have_the_time_that_pandas_counts_in_published_traces(name: str) -> None:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip("the published traces are not beside this repository")
    frame = pd.DataFrame([{**event.get("args", {}), **event} for event in events(path) if "cat" in event])
    kernels = frame[frame["cat"] == "kernel"]
    calls = frame[frame["cat"].isin(["cuda_runtime", "cuda_driver"])].drop_duplicates("correlation")
    kernels = kernels.merge(calls[["correlation", "tid", "start"]], "left", "correlation", suffixes=("", "_call"))
    ranges = frame[frame["cat"].isin(["cpu_op", "user_annotation"])]
    ranges = ranges[~ranges["name"].str.startswith("ProfilerStep")].assign(length=ranges["end"] - ranges["start"])
    # Of those that are equal to the microsecond the inner one comes later in the file.
    by_thread = dict(iter(ranges[::-1].sort_values("length", kind="stable").groupby("tid")))

    def shortest_around(kernel: Any) -> str | None:
        own = by_thread.get(kernel.tid_call)
        if own is None:
            return None
        inside = (own["start"].to_numpy() <= kernel.start_call) & (kernel.start_call < own["end"].to_numpy())
        return str(own["name"].iloc[inside.argmax()]) if inside.any() else None

    kernels = kernels.assign(
        operator=[shortest_around(kernel) for kernel in kernels.itertuples()], ns=kernels["end"] - kernels["start"]
    )
    expected = kernels.groupby("operator", dropna=False)["ns"].agg(["size", "sum"])
    trace = import_files(path)
    counted = trace.kernels(trace.ranks[0])
    counted = counted[counted["kind"].isin(["compute", "communication"])].astype({"operator": object})
    lengths = counted["end_ns"] - counted["start_ns"]
    pd.testing.assert_frame_equal(
        lengths.groupby(counted["operator"], dropna=False).agg(["size", "sum"]),
        expected,
        check_names=False,
        check_dtype=False,
        check_index_type=False,
    )
    assert len(expected) > 20
    largest = TraceAnalysis(trace).activity(trace.ranks[0]).operators[0]
    assert largest.time_ms == pytest.approx(expected.loc[largest.name, "sum"] / 1e6)
