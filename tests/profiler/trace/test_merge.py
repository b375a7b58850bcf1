"""Merging of the traces that the hosts of a job recorded."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import TraceError
from ebbtide.profiler.trace import open_trace
from ebbtide.profiler.trace.merge import merge
from ebbtide.profiler.trace.metadata import ClockInfo
from ebbtide.profiler.trace.schema import (
    FORMAT,
    SCHEMA,
    TABLES,
)
from tests.profiler.trace.test_trace_files import LATE, refusal, sample, with_none


def test_merge__aligns_ranks_to_the_clock_of_the_first_trace(tmp_path: Path) -> None:
    second, first = (
        sample(tmp_path / "b.ebb", 1, LATE + 100),
        sample(tmp_path / "a.ebb", 0, LATE),
    )
    merged = merge([second, first], tmp_path / "m.ebb")
    assert merged.ranks == [0, 1]
    assert merged.meta.hosts == ("b", "a")
    assert merged.meta.clock == ClockInfo(wall_offset_ns=LATE + 100)
    assert [merged.rank(rank).first_iteration_start_ns - LATE for rank in (0, 1)] == [
        -100,
        0,
    ]
    assert [merged.rank(rank).started_ns - LATE for rank in (0, 1)] == [-105, -5]
    times = (
        "t_ns",
        "start_ns",
        "end_ns",
        "gpu_start_ns",
        "gpu_end_ns",
        "launch_ns",
        "awaited_ns",
    )
    for name in TABLES:
        assert with_none(merged.table(1, name)) == with_none(second.table(1, name))
        expected = [
            {
                key: value - 100 if key in times and value is not None else value
                for key, value in row.items()
            }
            for row in with_none(first.table(0, name))
        ]
        assert with_none(merged.table(0, name)) == expected


def test_merge__keeps_keys_that_the_format_does_not_specify(tmp_path: Path) -> None:
    traces = [sample(tmp_path / "a.ebb"), sample(tmp_path / "b.ebb", 1)]
    for number, trace in enumerate(traces):
        raw_meta = trace.raw_meta | {"cluster": number}
        raw_meta["ranks"][0]["devices"] = [{"device": "cuda:0", "ecc": True}]
        raw_meta["ranks"][0]["slurm"] = {"job": number}
        (trace.path / "meta.json").write_text(
            json.dumps({"format": FORMAT, "schema": SCHEMA, **raw_meta})
        )
    merged = merge([open_trace(trace.path) for trace in traces], tmp_path / "m.ebb")
    assert merged.raw_meta["cluster"] == 0
    assert [entry["slurm"] for entry in merged.raw_meta["ranks"]] == [
        {"job": 0},
        {"job": 1},
    ]
    assert [entry["devices"] for entry in merged.raw_meta["ranks"]] == [
        [{"device": "cuda:0", "ecc": True}]
    ] * 2


@pytest.mark.parametrize(
    ("rank", "offset", "says"),
    [
        pytest.param(0, 5, "both have rank 0", id="the same rank"),
        pytest.param(1, None, "does not have its clock's offset", id="no clock"),
    ],
)
def test_merge__refuses_traces_that_are_not_of_one_job(
    tmp_path: Path, rank: int, offset: Any, says: str
) -> None:
    traces = [sample(tmp_path / "a.ebb"), sample(tmp_path / "b.ebb", rank, offset)]
    assert says in refusal(lambda: merge(traces, tmp_path / "m.ebb"))
    assert not (tmp_path / "m.ebb").exists()


def test_merge__onto_one_of_its_inputs_loses_nothing(tmp_path: Path) -> None:
    sample(tmp_path / "a.ebb"), sample(tmp_path / "b.ebb", 1)
    with suppress(TraceError):
        merge(
            [open_trace(tmp_path / name) for name in ("a.ebb", "b.ebb")],
            tmp_path / "a.ebb",
            force=True,
        )
    assert len(open_trace(tmp_path / "a.ebb").phases(0)) == 2
