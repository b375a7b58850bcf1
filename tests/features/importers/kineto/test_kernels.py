"""Kernels of a Kineto trace: kinds, launches, steps; and their activity against a
direct count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.iterations import intervals
from tests.features.importers.kineto.made_kineto import (
    BASE,
    import_files,
    iteration,
    launched,
    span,
    write_trace,
)

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "kineto"
US = 1000


def test_kernels__have_kinds_launches_and_streams(tmp_path: Path) -> None:
    work = [
        *launched(11, 15, 20, 1, name="sgemm"),
        *launched(
            12,
            16,
            21,
            2,
            stream=20,
            name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)",
        ),
        *launched(13, 22, 23, 3, cat="gpu_memset", name="Memset (Device)"),
        *launched(
            14, 23, 24, 4, cat="gpu_memcpy", name="Memcpy DtoD (Device -> Device)"
        ),
        *launched(
            15, 24, 25, 5, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"
        ),
        span("rcclGenericKernel", 26, 27, "kernel", device=0, stream=3, correlation=99),
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [*iteration(1, 0), *work]))
    kernels = trace.kernels(0)
    assert kernels["kind"].tolist() == [
        "compute",
        "communication",
        "memset",
        "copy",
        "communication",
    ]
    assert kernels["stream"].tolist() == [7, 20, 7, 7, 3]
    launches = [BASE + us * US for us in (11, 12, 13, 14)]
    assert kernels["launch_ns"].tolist()[:4] == launches
    assert kernels["launch_ns"].isna().tolist() == [False] * 4 + [True]
    copies = trace.transfers(0)
    assert copies["name"].tolist() == ["Memcpy HtoD (Pinned -> Device)"]
    assert copies["launch_ns"].tolist() == [BASE + 15 * US]


def test_kernels__name_the_process_groups_of_collectives(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [
        {
            "Process Group Name": "3",
            "Process Group Ranks": "[0, 1]",
            "Collective name": "allreduce",
        },
        {"Process Group Name": "0"},
        {
            "Process Group Name": "5",
            "Process Group Ranks": "[0, 1]",
            "Collective name": "send",
        },
        {"Collective name": "allreduce"},
        {"Process Group Name": 7, "Process Group Ranks": [1, 2]},
    ]
    work = [
        launched(
            10 + n, 20 + n, 20.5 + n, n + 1, name="ncclDevKernel_AllReduce", **args
        )
        for n, args in enumerate(groups)
    ]
    trace = import_files(
        write_trace(tmp_path / "run.json", [event for pair in work for event in pair])
    )
    labels = trace.kernels(0)["group"]
    assert [None if label is None else str(label) for label in labels.astype(object).where(labels.notna(), None)] == [
        "3 [0, 1]", "0", None, None, "7 [1, 2]",
    ]  # fmt: skip


def test_annotations__are_those_of_the_host_with_their_threads(tmp_path: Path) -> None:
    ranges = [
        span("load", 1, 2),
        {**span("## forward ##", 3, 9), "tid": 77},
        {**span("load", 4, 5.5), "tid": "python"},
        span("load", 3, 4, "gpu_user_annotation"),
    ]
    trace = import_files(
        write_trace(tmp_path / "run.json", [*ranges, *launched(3, 4, 5, 1)])
    )
    rows = trace.annotations(0)
    assert (rows[["start_ns", "end_ns"]] - BASE).to_numpy().tolist() == [
        [1000, 2000],
        [3000, 9000],
        [4000, 5500],
    ]
    assert rows["name"].tolist() == ["load", "## forward ##", "load"]
    assert rows["thread"].tolist() == [1, 77, pd.NA]


def test_annotations__of_a_trace_with_too_many_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.features.importers.kineto.importer.MAX_COUNT", 3)
    for count in (3, 4):
        trace = import_files(
            write_trace(
                tmp_path / "run.json", [span("load", n, n + 1) for n in range(count)]
            )
        )
        assert len(trace.annotations(0)) == (3 if count == 3 else 0)
        assert any("4 annotations are left out" in note for note in trace.notes) == (
            count == 4
        )


def test_steps__bound_iterations_with_their_tail(tmp_path: Path) -> None:
    tail = launched(
        95, 96, 130, 1, cat="gpu_memcpy", name="Memcpy DtoH (Device -> Pinned)", bytes=8
    )
    work = [
        *launched(15, 20, 25, 2),
        *launched(45, 50, 60, 3),
        *launched(82, 85, 88, 4),
        *launched(92, 93, 95, 5),
    ]
    trace = import_files(
        write_trace(tmp_path / "run.json", [*iteration(1, 0), *work, *tail])
    )
    host, device = (
        intervals(trace, 0, device_times=on_device).spans for on_device in (False, True)
    )
    assert (host["start_ns"] - BASE).tolist() == [0]
    assert (host["end_ns"] - BASE).tolist() == [100 * US]
    assert (device["end_ns"] - BASE).tolist() == [130 * US]
    phases = {phase.phase: phase for phase in TraceAnalysis(trace).activity(0).phases}
    # From the update's end at 88 us on, the tail runs a kernel of 2 us and a copy of 34
    # us.
    assert phases["other"].copy_ms == pytest.approx(0.034)
    assert phases["other"].compute_ms == pytest.approx(0.002)


def test_steps__without_a_step_mark_an_iteration_ends_with_its_last_phase(
    tmp_path: Path,
) -> None:
    marks = [
        event
        for event in iteration(1, 0)
        if not event["name"].startswith("ProfilerStep")
    ]
    trace = import_files(write_trace(tmp_path / "run.json", marks))
    assert trace.iteration_marks(0).empty
    assert (intervals(trace, 0).spans["end_ns"] - BASE).tolist() == [90 * US]


def test_phases__contain_the_collectives_that_they_launched_until_the_next_phase_begins(
    tmp_path: Path,
) -> None:
    """An all-reduce launched in the backward runs on after it: that is the backward,
    not the time between phases."""
    work = [
        *launched(15, 20, 30, 1),
        *launched(45, 50, 60, 2),
        *launched(65, 60, 80, 3, stream=20, name="ncclDevKernel_AllReduce"),
        *launched(82, 85, 88, 4),
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [*iteration(1, 0), *work]))
    ends = (trace.phases(0)["gpu_end_ns"] - BASE).tolist()
    assert ends == [30 * US, 80 * US, 88 * US]
    phases = {phase.phase: phase for phase in TraceAnalysis(trace).activity(0).phases}
    assert phases["backward"].communication_ms == pytest.approx(0.020)
    assert phases["other"].communication_ms == 0
