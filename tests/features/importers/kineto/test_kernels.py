"""Kernels of a Kineto trace: kinds, launches, steps; and their activity against a direct count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.iterations import intervals
from tests.features.importers.kineto.made_kineto import (
    BASE,
    Event,
    events,
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
        *launched(12, 16, 21, 2, stream=20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
        *launched(13, 22, 23, 3, cat="gpu_memset", name="Memset (Device)"),
        *launched(14, 23, 24, 4, cat="gpu_memcpy", name="Memcpy DtoD (Device -> Device)"),
        *launched(15, 24, 25, 5, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"),
        span("rcclGenericKernel", 26, 27, "kernel", device=0, stream=3, correlation=99),
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [*iteration(1, 0), *work]))
    kernels = trace.kernels(0)
    assert kernels["kind"].tolist() == ["compute", "communication", "memset", "copy", "communication"]
    assert kernels["stream"].tolist() == [7, 20, 7, 7, 3]
    launches = [BASE + us * US for us in (11, 12, 13, 14)]
    assert kernels["launch_ns"].tolist()[:4] == launches
    assert kernels["launch_ns"].isna().tolist() == [False] * 4 + [True]
    copies = trace.transfers(0)
    assert copies["name"].tolist() == ["Memcpy HtoD (Pinned -> Device)"]
    assert copies["launch_ns"].tolist() == [BASE + 15 * US]


def test_kernels__name_the_process_groups_of_collectives(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [
        {"Process Group Name": "3", "Process Group Ranks": "[0, 1]", "Collective name": "allreduce"},
        {"Process Group Name": "0"},
        {"Process Group Name": "5", "Process Group Ranks": "[0, 1]", "Collective name": "send"},
        {"Collective name": "allreduce"},
        {"Process Group Name": 7, "Process Group Ranks": [1, 2]},
    ]
    work = [
        launched(10 + n, 20 + n, 20.5 + n, n + 1, name="ncclDevKernel_AllReduce", **args)
        for n, args in enumerate(groups)
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [event for pair in work for event in pair]))
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
    trace = import_files(write_trace(tmp_path / "run.json", [*ranges, *launched(3, 4, 5, 1)]))
    rows = trace.annotations(0)
    assert (rows[["start_ns", "end_ns"]] - BASE).to_numpy().tolist() == [[1000, 2000], [3000, 9000], [4000, 5500]]
    assert rows["name"].tolist() == ["load", "## forward ##", "load"]
    assert rows["thread"].tolist() == [1, 77, pd.NA]


def test_annotations__of_a_trace_with_too_many_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.features.importers.kineto.importer.MAX_COUNT", 3)
    for count in (3, 4):
        trace = import_files(write_trace(tmp_path / "run.json", [span("load", n, n + 1) for n in range(count)]))
        assert len(trace.annotations(0)) == (3 if count == 3 else 0)
        assert any("4 annotations are left out" in note for note in trace.notes) == (count == 4)


def test_kernels__are_not_known_where_the_file_is_cut_off(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.json", [*iteration(1, 0), *launched(11, 15, 20, 1), *launched(12, 21, 22, 2)])
    cut = tmp_path / "run.json"
    cut.write_text(whole.read_text()[:-60])
    trace = import_files(cut)
    assert trace.kernels(0).empty
    assert TraceAnalysis(trace).activity(0).total.compute_ms is None


def test_steps__bound_iterations_with_their_tail(tmp_path: Path) -> None:
    tail = launched(95, 96, 130, 1, cat="gpu_memcpy", name="Memcpy DtoH (Device -> Pinned)", bytes=8)
    work = [*launched(15, 20, 25, 2), *launched(45, 50, 60, 3), *launched(82, 85, 88, 4), *launched(92, 93, 95, 5)]
    trace = import_files(write_trace(tmp_path / "run.json", [*iteration(1, 0), *work, *tail]))
    host, device = (intervals(trace, 0, device_times=on_device).spans for on_device in (False, True))
    assert (host["start_ns"] - BASE).tolist() == [0]
    assert (host["end_ns"] - BASE).tolist() == [100 * US]
    assert (device["end_ns"] - BASE).tolist() == [130 * US]
    phases = {phase.phase: phase for phase in TraceAnalysis(trace).activity(0).phases}
    # From the update's end at 88 us on, the tail runs a kernel of 2 us and a copy of 34 us.
    assert phases["other"].copy_ms == pytest.approx(0.034)
    assert phases["other"].compute_ms == pytest.approx(0.002)


def test_steps__without_a_step_mark_an_iteration_ends_with_its_last_phase(tmp_path: Path) -> None:
    marks = [event for event in iteration(1, 0) if not event["name"].startswith("ProfilerStep")]
    trace = import_files(write_trace(tmp_path / "run.json", marks))
    assert trace.iteration_marks(0).empty
    assert (intervals(trace, 0).spans["end_ns"] - BASE).tolist() == [90 * US]


def test_phases__contain_the_collectives_that_they_launched_until_the_next_phase_begins(tmp_path: Path) -> None:
    """An all-reduce launched in the backward runs on after it: that is the backward, not the time between phases."""
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


def union_us(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals by going through them in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total_ms(spans: Iterable[tuple[int, int]]) -> float:
    return sum(end - start for start, end in union_us(spans)) / 1e6


@pytest.mark.parametrize("name", ["control.json.gz", "sampled_rank-0.json.gz"])
def test_activity__agrees_with_a_direct_count_of_published_traces(name: str) -> None:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip("the published traces are not beside this repository")
    work: dict[str, list[Event]] = {"kernel": [], "gpu_memcpy": [], "gpu_memset": []}
    for event in events(path):
        work.get(event.get("cat", ""), []).append(event)
    spans = {cat: [(e["start"], e["end"]) for e in of_cat] for cat, of_cat in work.items()}
    collectives = [(e["start"], e["end"]) for e in work["kernel"] if "nccl" in e["name"].lower()]
    compute = [(e["start"], e["end"]) for e in work["kernel"] if "nccl" not in e["name"].lower()]
    all_spans = [interval for of_cat in spans.values() for interval in of_cat]
    span_ms = (max(end for _, end in all_spans) - min(start for start, _ in all_spans)) / 1e6
    trace = import_files(path)
    activity = TraceAnalysis(trace).activity(trace.ranks[0])
    total = activity.total
    assert total.span_ms == pytest.approx(span_ms)
    assert total.compute_ms == pytest.approx(total_ms(compute))
    assert total.communication_ms == pytest.approx(total_ms(collectives))
    assert total.copy_ms == pytest.approx(total_ms(spans["gpu_memcpy"]))
    assert total.idle_ms == pytest.approx(span_ms - total_ms(all_spans))
    both = total_ms(compute) + total_ms(collectives) - total_ms(compute + collectives)
    assert total.communication_overlap_share == pytest.approx(both / total_ms(collectives))
    assert sum(activity.without_compute.values()) == pytest.approx(span_ms - total_ms(compute))
    by_name: dict[str, int] = {}
    for event in work["kernel"]:
        by_name[event["name"]] = by_name.get(event["name"], 0) + event["end"] - event["start"]
    first = activity.kernels[0]
    assert first.time_ms == pytest.approx(max(by_name.values()) / 1e6)
    assert by_name[first.name] == max(by_name.values())
    assert first.share == pytest.approx(max(by_name.values()) / sum(by_name.values()))
