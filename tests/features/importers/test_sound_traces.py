"""Imports leave out what readers of traces refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.analysis.metrics.iterations import slowest_times
from ebbtide.errors import TraceError
from ebbtide.features.importers.load import import_trace
from ebbtide.profiler.trace import TraceBuilder, open_trace
from ebbtide.profiler.trace.files import write_table
from ebbtide.profiler.trace.schema import TABLES
from tests.features.importers.kineto.made_kineto import (
    iteration,
    launched,
    span,
    write_trace,
)

UNIX_US = 1_790_857_026_000_000


def test_import__leaves_out_an_activity_far_from_all_others(tmp_path: Path) -> None:
    events = [
        event
        for number in range(4)
        for event in [
            *iteration(number, UNIX_US + 100 * number),
            *launched(
                UNIX_US + 100 * number + 12,
                UNIX_US + 100 * number + 13,
                UNIX_US + 100 * number + 30,
                number + 1,
            ),
        ]
    ]
    events.append(span("lost", 0, 10, "kernel", device=0, stream=7))
    file = write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0)
    trace = open_trace(import_trace([file], tmp_path / "t.ebb").path)
    assert trace.kernels(0)["name"].tolist() == ["gemm"] * 4
    assert [line for line in trace.notes if "left out" in line] == [
        "1 row of kernels left out: its times start_ns span 1,790,857,026 s"
    ]
    for table in TABLES:
        trace.columns(0, table)


def test_import__counts_steps_whose_numbers_descend(tmp_path: Path) -> None:
    events = [
        event for n in range(6) for event in iteration(number=50 - n, ts=100.0 * n)
    ]
    file = write_trace(tmp_path / "t.json", events)
    trace = import_trace([file], tmp_path / "t.ebb")
    times = slowest_times(trace)
    assert times.numbers.tolist() == [2, 3, 4, 5]
    np.testing.assert_allclose(times.columns["iteration"], 0.1)
    assert sum("do not ascend" in line for line in trace.notes) == 1


@pytest.mark.parametrize(
    ("table", "rows", "reason"),
    [
        (
            "kernels",
            {"start_ns": 5, "end_ns": 4, "device": "cuda:0", "kind": "copy"},
            "ends before it starts",
        ),
        ("annotations", {"start_ns": 5, "end_ns": 4}, "ends before it starts"),
        ("iteration_marks", {"start_ns": 5, "end_ns": 6}, "do not ascend"),
    ],
)
def test_trace_builder__writes_no_row_that_readers_refuse(
    tmp_path: Path, table: str, rows: dict[str, object], reason: str
) -> None:
    builder = TraceBuilder()
    names = {column.name for column in TABLES[table]}
    for row in (rows | {"start_ns": 1, "end_ns": 2}, rows):
        given = {"name": "k", "iteration": 0, **row}
        builder.rank(0).add(table, **{k: v for k, v in given.items() if k in names})
    refused = list(builder.rank(0).tables_of(table))
    trace = builder.write(tmp_path / "t.ebb")
    assert trace.table(0, table)["start_ns"].tolist() == [1]
    assert [line for line in trace.notes if reason in line]
    write_table(trace.path, 0, table, refused)
    with pytest.raises(TraceError, match=reason):
        open_trace(trace.path).columns(0, table)
