"""The tables `transfers` and `kernels` from slices that torch's profiler recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ebbtide.profiler.recording.spools.slices import read_slices, slice_spans

BASE = 1_700_000_000_000_000_000


def copy(name: str, ts: float, dur: float = 1.5, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def write(path: Path, *events: Any, base: int | None = BASE) -> Path:
    trace: dict[str, Any] = {"schemaVersion": 1, "traceEvents": list(events)}
    if base is not None:
        trace["baseTimeNanoseconds"] = base
    path.write_text(json.dumps(trace))
    return path


def read(
    paths: list[Path], shift_ns: int
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    tables, problems = read_slices(paths, shift_ns)
    return tables["transfers"], tables["kernels"], problems


def test_read__returns_only_copies_between_host_and_device(tmp_path: Path) -> None:
    path = write(
        tmp_path / "copies-1.json",
        copy(
            "Memcpy HtoD (Pinned -> Device)",
            10.25,
            device=0,
            stream=7,
            bytes=4096,
            correlation=3,
        ),
        copy("Memcpy HtoD (Pageable -> Device)", 20, device=1, stream=7, bytes=10),
        copy("Memcpy DtoH (Device -> Pageable)", 30.001, device=0, stream=9, bytes=11),
        copy("Memcpy DtoH (Device -> Pinned)", 40, device=0, stream=9, bytes=12),
        copy("Memcpy DtoD (Device -> Device)", 50, device=0, stream=7, bytes=13),
        copy("Memset (Device)", 60, device=0, stream=7, bytes=14),
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "Memcpy HtoD (Pinned -> Device)",
            "ts": 70,
            "dur": 1,
        },
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaMemcpyAsync",
            "ts": 8,
            "dur": 1,
            "args": {"correlation": 3},
        },
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    )
    rows, _, problems = read([path], 1_000 - BASE)
    assert problems == []
    assert rows.iloc[0].to_dict() == {
        "start_ns": 11_250,
        "end_ns": 12_750,
        "device": "cuda:0",
        "direction": "h2d",
        "bytes": 4096,
        "host_memory": "pinned",
        "stream": 7,
        "name": "Memcpy HtoD (Pinned -> Device)",
        "launch_ns": 9_000,
    }
    columns = ["start_ns", "device", "direction", "host_memory", "bytes"]
    assert rows.loc[1:, columns].to_numpy().tolist() == [
        [21_000, "cuda:1", "h2d", "pageable", 10],
        [31_001, "cuda:0", "d2h", "pageable", 11],
        [41_000, "cuda:0", "d2h", "pinned", 12],
    ]


def test_read__returns_kernels_with_their_launches(tmp_path: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "ts": 10,
            "dur": 3,
            "args": {"device": 0, "correlation": 4},
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclKernel_AllReduce",
            "ts": 12,
            "dur": 9,
            "args": {"device": 0},
        },
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": 6,
            "dur": 1,
            "args": {"correlation": 4},
        },
        copy("Memcpy DtoD (Device -> Device)", 50, device=0, stream=7, bytes=13),
    ]
    earlier = write(
        tmp_path / "copies-2.json", *events[2:], events[0], base=BASE - 100_000
    )
    _, kernels, problems = read(
        [write(tmp_path / "copies-1.json", *events), earlier], -BASE
    )
    assert problems == []
    assert kernels["start_ns"].tolist() == [-90_000, -50_000, 10_000, 12_000, 50_000]
    assert kernels["launch_ns"].tolist() == [-94_000, pd.NA, 6_000, pd.NA, pd.NA]
    assert kernels["kind"].tolist() == [
        "compute",
        "copy",
        "compute",
        "communication",
        "copy",
    ]


def test_read__leaves_unrecorded_values_of_a_copy_missing(tmp_path: Path) -> None:
    unnamed, unknown = (
        copy("Memcpy HtoD", 1, device=0),
        copy("Memcpy DtoH (Device -> Unknown)", 2, device=0, stream=3),
    )
    rows, _, problems = read([write(tmp_path / "copies-1.json", unnamed, unknown)], 0)
    assert problems == []
    assert rows["bytes"].isna().all()
    assert rows["host_memory"].isna().all()
    assert rows["stream"].isna().tolist() == [True, False]


def test_read__returns_an_empty_table_for_no_files() -> None:
    rows, _, problems = read([], 0)
    assert (len(rows), problems) == (0, [])
    assert list(rows["direction"]) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"cat": "gpu_memcpy", "name": "Memcpy HtoD"',
        "",
        "3",
        "{}",
        '{"traceEvents": {}}',
    ],
)
def test_read__reports_a_broken_file_and_reads_the_others(
    tmp_path: Path, text: str
) -> None:
    broken = tmp_path / "copies-1.json"
    broken.write_text(text)
    complete = write(
        tmp_path / "copies-2.json", copy("Memcpy DtoH (Device -> Pinned)", 1, bytes=8)
    )
    rows, _, problems = read([broken, tmp_path / "gone.json", complete], 0)
    assert rows["bytes"].tolist() == [8]
    assert len(problems) == 2
    assert "copies-1.json could not be read (it " in problems[0]
    assert "gone.json" in problems[1]
    assert "\n" not in "".join(problems)


def test_read__returns_copies_before_the_damage(tmp_path: Path) -> None:
    cut = write(
        tmp_path / "copies-1.json",
        copy("Memcpy DtoH", 1, bytes=8),
        copy("Memcpy DtoH", 2, bytes=9),
    )
    cut.write_text(cut.read_text()[:-80])
    damaged = write(
        tmp_path / "copies-2.json",
        copy("Memcpy DtoH", -1e300),
        copy("Memcpy DtoH", 3, bytes=10),
    )
    rows, _, problems = read([cut, damaged], 0)
    assert rows["bytes"].tolist() == [8, 10]
    assert problems == [
        "the copies in copies-1.json could not all be read (it breaks off)",
        "the copies in copies-2.json could not all be read (some are damaged)",
    ]


def test_spans_of__covers_whole_iterations_and_joins_slices_without_a_pause() -> None:
    phases = pd.DataFrame({"end_ns": [10, 20, 30, 40, 90]})
    paths = [
        Path("x-copies-95-120.json"),
        Path("x-copies-21-31.json"),
        Path("x-copies-33-41.json"),
    ]
    assert slice_spans(paths, phases) == [(20, 41), (90, 120)]
    assert slice_spans([Path("x-copies-5-9.json")], phases) == [(5, 9)]
    assert slice_spans([Path("x-copies-1.json")], phases) == []
