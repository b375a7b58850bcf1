"""Files that lack what training has: ranges that never end, inference, old formats."""

from __future__ import annotations

import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.metrics.inference import inference_steps
from ebbtide.analysis.metrics.iterations import slowest_times
from ebbtide.analysis.metrics.out_of_memory import MICRO_BATCH, out_of_memory
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import SourceError
from tests.conftest import ebbtide_in_process
from tests.features.importers.kineto.made_kineto import span, write_trace

MS = 1_000_000
MIB = 1 << 20
TIME_US = 1_790_857_026_000_000


def nsys_export(path: Path, ranges: list[tuple[int, int, str]]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, "
            "textId INT, globalTid INT, domainId INT)"
        )
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, 16777217, 0)", ranges
        )
    database.close()
    return path


def test_import__ends_ranges_that_were_never_popped(tmp_path: Path) -> None:
    ranges = []
    for number in range(8):
        start = 17 * number * MS
        ranges.append((start, 300 * MS, f"iteration{number}"))
        ranges.append((start + MS, start + 9 * MS, "forward"))
    trace = import_trace(
        [nsys_export(tmp_path / "x.sqlite", ranges)], tmp_path / "t.ebb"
    )
    assert set(slowest_times(trace).columns["iteration"]) == {17.0}
    assert sum("were never popped" in line for line in trace.notes) == 1


def test_import__names_what_an_export_without_cuda_lacks(tmp_path: Path) -> None:
    file = tmp_path / "x.sqlite"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE OSRT_API (start INT, end INT)")
    database.close()
    with pytest.raises(SourceError, match="--trace=cuda,nvtx"):
        import_trace([file], tmp_path / "t.ebb")


def snapshot(path: Path, traces: list[list[dict[str, Any]]]) -> Path:
    blocks = [
        {"size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": []}
    ]
    segments = [
        {"device": device, "address": 1 << 40, "total_size": MIB, "blocks": blocks}
        for device in range(len(traces))
    ]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": traces}))
    return path


def event(action: str, at_us: int, addr: int, size: int = MIB) -> dict[str, Any]:
    time_us = TIME_US + at_us
    return {"action": action, "addr": addr, "size": size, "time_us": time_us}


def test_import__counts_no_block_that_was_freed_before_the_recording(
    tmp_path: Path,
) -> None:
    early = [event("free_completed", 0, 1 << 41, 9 * MIB)]
    file = snapshot(tmp_path / "early.pickle", [early])
    trace = import_trace([file], tmp_path / "t.ebb")
    memory = trace.memory(0)
    requested = memory.loc[memory["pool"] == "requested", "bytes"]
    assert set(requested) == {MIB}
    # A recording that has completed releases alone frees its own blocks by them.
    own = [event("alloc", 0, 1 << 41), event("free_completed", 5, 1 << 41)]
    file = snapshot(tmp_path / "own.pickle", [own])
    memory = import_trace([file], tmp_path / "t.ebb", force=True).memory(0)
    requested = memory.loc[memory["pool"] == "requested", "bytes"]
    assert (requested.max(), requested.iloc[-1]) == (2 * MIB, MIB)


def test_import__shows_the_device_that_ran_out_of_memory(tmp_path: Path) -> None:
    busy = [event("alloc", n, (1 << 41) + n * MIB) for n in range(9)]
    failed = [event("alloc", 0, 1 << 42), event("oom", 5, 0, 99 * MIB)]
    file = snapshot(tmp_path / "x.pickle", [busy, failed])
    trace = import_trace([file], tmp_path / "t.ebb")
    assert trace.rank(0).main_device.device == "cuda:1"
    for command in ("summary", "findings"):
        shown = ebbtide_in_process(command, trace.path).stdout
        assert "rank 0 ran out of memory on cuda:1" in shown


def test_out_of_memory__halves_the_temporaries_of_a_forward(tmp_path: Path) -> None:
    calls = [
        ("/job/model.py", "update_nodes"),
        ("/job/model.py", "forward"),
        ("/site/torch/nn/modules/module.py", "_call_impl"),
    ]
    frames = [{"filename": file, "name": name, "line": 1} for file, name in calls]
    events = [
        {**event("alloc", n, (1 << 41) + n * 8 * MIB, 8 * MIB), "frames": frames}
        for n in range(4)
    ]
    freed_at = [event("free_requested", 20, e["addr"], 8 * MIB) for e in events]
    events += [event("oom", 10, 0, 99 * MIB), *freed_at]
    trace = import_trace(
        [snapshot(tmp_path / "x.pickle", [events])], tmp_path / "t.ebb"
    )
    error = out_of_memory(trace, 0)
    assert error is not None
    temporaries = [h.bytes for h in error.memory.holders if h.category == "temporary"]
    assert sum(temporaries) == 4 * 8 * MIB
    freed = {remedy.name: remedy.bytes for remedy in error.remedies}
    others = sum(h.bytes for h in error.memory.holders if h.category is None)
    assert freed[MICRO_BATCH] == (4 * 8 * MIB + others) // 2


def test_summary__shows_the_steps_of_inference(tmp_path: Path) -> None:
    events = []
    for number in range(5):
        start = number * 100.0
        requests, tokens = (2, 512) if number == 0 else (0, 0)
        name = f"execute_context_{requests}({tokens})_generation_4(4)"
        events.append(span(name, start, start + (80 if requests else 20)))
        events.append(
            span("nn.Module: Linear_0", start + 5, start + 15, "python_function")
        )
        events.append(span("aten::linear", start + 6, start + 14, "cpu_op"))
    trace = import_trace([write_trace(tmp_path / "x.json", events)], tmp_path / "t.ebb")
    assert [tuple(step) for step in inference_steps(trace, 0)] == [
        ("forward", 5, 0.01),
        ("prefill", 1, 0.08),
        ("decode", 4, 0.02),
    ]
    shown = ebbtide_in_process("summary", trace.path).stdout
    assert "only forwards, as of inference" in shown
    assert "with gradients" not in shown
    assert "decode (4 times), median" in shown


def test_import__a_trace_without_gpu_events_has_times_of_operators(
    tmp_path: Path,
) -> None:
    events = []
    for step in range(3):
        start = 100 * step
        events.append(span("aten::linear", start, start + 50, "cpu_op"))
        events.append(span("aten::addmm", start + 10, start + 40, "cpu_op"))
        events.append(span("aten::copy_", start + 15, start + 20, "cpu_op"))
        # A range of the user is no operator.
        events.append(span("load", start, start + 90, "user_annotation"))
    trace = import_trace([write_trace(tmp_path / "x.json", events)], tmp_path / "t.ebb")
    operators = trace.rank(0).operators
    assert [(one.name, one.calls, one.self_ns) for one in operators] == [
        ("aten::addmm", 3, 75_000),
        ("aten::linear", 3, 60_000),
        ("aten::copy_", 3, 15_000),
    ]
    shown = ebbtide_in_process("summary", trace.path).stdout
    assert "Operators of the CPU" in shown
    assert "aten::addmm" in shown


def test_import__reads_traces_of_the_legacy_profiler(tmp_path: Path) -> None:
    events = []
    for step in range(4):
        rows: list[tuple[str, int, int, str, int]] = [
            ("aten::zeros", 0, 1, "CPU functions", 1),
            ("aten::addmm", 1, 5, "CPU functions", 1),
            ("aten::nll_loss", 6, 9, "CPU functions", 1),
            ("NllLossBackward", 10, 12, "CPU functions", 2),
            ("AddmmBackward", 13, 16, "CPU functions", 2),
            ("aten::addmm", 14, 15, "CPU functions", 2),
            ("Optimizer.step#SGD.step", 20, 30, "CPU functions", 1),
            ("gemm", 5, 12, "CUDA functions", 0),
        ]
        for name, start, end, process, thread in rows:
            times = {"ts": step * 100 + start, "dur": end - start}
            fields = {"name": name, "ph": "X", **times, "tid": thread, "pid": process}
            events.append({**fields, "args": {}})
    file = tmp_path / "legacy.json"
    file.write_text(json.dumps(events))
    trace = import_trace([file], tmp_path / "t.ebb")
    phases = trace.phases(0)
    assert phases["phase"].tolist() == ["forward", "backward", "update"] * 4
    # An op before the backward whose name is that of a node is of the forward.
    starts = ((phases["start_ns"] - phases["start_ns"].min()) // 1000 + 1).tolist()
    lengths = ((phases["end_ns"] - phases["start_ns"]) // 1000).tolist()
    assert starts[:3] == [1, 10, 20]
    assert lengths[:3] == [8, 6, 10]
    assert trace.kernels(0)["name"].tolist() == ["gemm"] * 4
    assert set(trace.kernels(0)["device"]) == {"cuda:0"}
