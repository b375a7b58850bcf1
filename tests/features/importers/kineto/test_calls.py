"""Calls of a Kineto trace: launches, waits, and what they wait for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ebbtide.analysis.metrics.critical_path.critical_path import path_segments
from tests.features.importers.kineto.made_kineto import (
    BASE,
    Event,
    import_files,
    span,
    write_trace,
)

US = 1000


def call(name: str, start: float, end: float, correlation: int, tid: int = 5) -> Event:
    return span(name, start, end, "cuda_runtime", correlation=correlation) | {
        "tid": tid
    }


def wait(name: str, correlation: int, **args: int) -> Event:
    return span(name, 0, 1, "cuda_sync", correlation=correlation, **args)


def kernel(start: float, end: float, stream: int, correlation: int) -> Event:
    return span(
        f"kernel {correlation}",
        start,
        end,
        "kernel",
        device=0,
        stream=stream,
        correlation=correlation,
    )


WORK = [
    *(call("cudaLaunchKernel", 10, 12, 1), kernel(14, 50, 7, 1)),
    call("cudaEventRecord", 13, 14, 2),
    *(call("cudaLaunchKernel", 15, 16, 3), kernel(50, 90, 7, 3)),
    call("cudaStreamWaitEvent", 17, 18, 4),
    wait(
        "Stream Wait Event",
        4,
        stream=20,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=2,
    ),
    *(call("cudaLaunchKernel", 19, 20, 5), kernel(51, 95, 20, 5)),
    *(call("cudaStreamSynchronize", 21, 97, 6), wait("Stream Sync", 6, stream=20)),
    *(
        call("cudaDeviceSynchronize", 97, 98, 7),
        wait("Context Sync", 7, stream=2**32 - 1),
    ),
    *(call("cudaMalloc", 99, 100, 8, tid=6), call("cudaEventQuery", 100, 101, 9)),
]


def test_calls__are_those_that_launch_wait_or_allocate(tmp_path: Path) -> None:
    calls = import_files(write_trace(tmp_path / "run.json", WORK)).calls(0)
    assert calls["name"].tolist() == [
        *(
            "cudaLaunchKernel",
            "cudaLaunchKernel",
            "cudaStreamWaitEvent",
            "cudaLaunchKernel",
        ),
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc"),
    ]
    assert (calls["start_ns"] - BASE).tolist() == [
        us * US for us in (10, 15, 17, 19, 21, 97, 99)
    ]
    assert (calls["end_ns"] - BASE).tolist() == [
        us * US for us in (12, 16, 18, 20, 97, 98, 100)
    ]
    assert calls["thread"].tolist() == [5, 5, 5, 5, 5, 5, 6]
    columns = calls[["stream", "awaited_stream", "awaited_ns"]]
    awaited = {
        row: [None if pd.isna(v) else v for v in values]
        for row, values in enumerate(columns.to_numpy().tolist())
    }
    nothing = [None] * 3
    assert awaited == {
        **dict.fromkeys(range(7), nothing), 2: [20, 7, BASE + 13 * US], 4: [None, 20, None]
    }  # fmt: skip


def test_calls__lead_the_critical_path_to_the_stream_that_was_waited_for(
    tmp_path: Path,
) -> None:
    trace = import_files(write_trace(tmp_path / "run.json", WORK))
    path = [
        (s.kind, s.name, (s.end_ns - s.start_ns) // US)
        for s in path_segments(trace, 0, BASE, BASE + 97 * US)
    ]
    assert path[-4:] == [
        ("kernel", "kernel 1", 36), ("wait", "for another stream", 1), ("kernel", "kernel 5", 44),
        ("wait", "cudaStreamSynchronize", 2),
    ]  # fmt: skip
