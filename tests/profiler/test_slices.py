"""Lines from allocator traces, and rows from the copies that torch's profiler recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.profiler.agent.options import Options
from ebbtide.profiler.agent.pools import REQUESTED, RESERVED
from ebbtide.profiler.agent.slices import AllocatorHistory, allocator_lines
from ebbtide.profiler.trace import copies


def entry(action: str, size: int, time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": 4096, "size": size, "stream": 0, "time_us": time_us, "device": 0}


def lines(trace: list[dict[str, Any]], requested: int = 0, reserved: int = 0) -> list[tuple[int, int, int]]:
    return list(allocator_lines(trace, requested, reserved))


def test_an_empty_trace_has_no_lines() -> None:
    assert lines([], 5, 10) == []


def test_a_block_counts_until_its_release_is_asked_for() -> None:
    trace = [entry("alloc", 100, 1), entry("free_requested", 100, 5), entry("free_completed", 100, 9)]
    assert lines(trace) == [(REQUESTED, 1_000, 100), (REQUESTED, 5_000, 0)]


def test_segments_are_reserved_by_allocation_and_by_mapping() -> None:
    trace = [
        entry("segment_alloc", 2048, 1),
        entry("segment_map", 512, 2),
        entry("segment_unmap", 512, 3),
        entry("segment_free", 2048, 4),
    ]
    assert [size for _, _, size in lines(trace)] == [2048, 2560, 2048, 0]
    assert {pool for pool, _, _ in lines(trace)} == {RESERVED}


def test_what_was_there_before_the_history_began_is_counted_in() -> None:
    trace = [
        entry("segment_alloc", 2048, 1),
        entry("alloc", 300, 2),
        entry("free_requested", 1000, 3),  # a block of before
        entry("free_completed", 1000, 4),
        entry("alloc", 50, 5),
    ]
    assert lines(trace, requested=5350, reserved=10_048) == [
        (RESERVED, 1_000, 10_048),
        (REQUESTED, 2_000, 6300),
        (REQUESTED, 3_000, 5300),
        (REQUESTED, 5_000, 5350),
    ]


def test_other_events_change_nothing() -> None:
    trace = [entry("alloc", 7, 1), entry("snapshot", 0, 2), entry("oom", 99, 3), entry("user_defined", 1, 4)]
    assert lines(trace, requested=7) == [(REQUESTED, 1_000, 7)]


def test_the_history_and_the_readings_measure_the_same() -> None:
    # Before: one block, 1000 bytes asked for and 1024 given. Then 700 asked for, 1024 given; then the first is freed.
    now = {
        "allocated_bytes.all": 1024,
        "requested_bytes.all": 700,
        "reserved_bytes.all": 2048,
    }
    stats = {name.partition(".")[0]: {"all": {"current": size}} for name, size in now.items()}
    trace = [entry("alloc", 700, 1), entry("free_requested", 1000, 2), entry("free_completed", 1000, 3)]
    block = {"size": 1024, "requested_size": 700, "address": 4096, "state": "active_allocated"}
    segment = {"device": 0, "address": 4096, "total_size": 2048, "blocks": [block]}
    snapshot = {"device_traces": [trace], "segments": [segment]}
    memory = SimpleNamespace(_snapshot=lambda: snapshot, _record_memory_history=lambda **_: None)
    cuda = SimpleNamespace(current_device=lambda: 0, is_initialized=lambda: True, memory=memory)
    torch = SimpleNamespace(
        cuda=cuda, _C=SimpleNamespace(_cuda_memoryStats=lambda _: stats, _cuda_isHistoryEnabled=lambda: False)
    )
    put: list[int] = []
    recorder: Any = SimpleNamespace(
        put=lambda kind, pool, device, x, y: put.append(y) if pool == REQUESTED else None,
    )
    history = AllocatorHistory(recorder, torch, Options(allocator_iterations=1))
    history.at_iteration(2)
    history.at_iteration(3)
    assert put == [1700, 700]


def copy(name: str, ts: float, dur: float = 1.5, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": args}


def write(path: Path, *events: Any, base: int | None = 1_700_000_000_000_000_000) -> Path:
    trace: dict[str, Any] = {"schemaVersion": 1, "traceEvents": list(events)}
    if base is not None:
        trace["baseTimeNanoseconds"] = base
    path.write_text(json.dumps(trace))
    return path


def test_copies_between_host_and_device_are_read_and_no_others(tmp_path: Path) -> None:
    path = write(
        tmp_path / "copies-1.json",
        copy("Memcpy HtoD (Pinned -> Device)", 10.25, device=0, stream=7, bytes=4096),
        copy("Memcpy HtoD (Pageable -> Device)", 20, device=1, stream=7, bytes=10),
        copy("Memcpy DtoH (Device -> Pageable)", 30.001, device=0, stream=9, bytes=11),
        copy("Memcpy DtoH (Device -> Pinned)", 40, device=0, stream=9, bytes=12),
        copy("Memcpy DtoD (Device -> Device)", 50, device=0, stream=7, bytes=13),
        copy("Memset (Device)", 60, device=0, stream=7, bytes=14),
        {"ph": "X", "cat": "cuda_runtime", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 70, "dur": 1},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    )
    rows, trouble = copies.read([path], 1_000 - 1_700_000_000_000_000_000)
    assert trouble == []
    assert rows[0] == {
        "start_ns": 11_250,
        "end_ns": 12_750,
        "device": "cuda:0",
        "direction": "h2d",
        "bytes": 4096,
        "host_memory": "pinned",
        "stream": 7,
        "name": "Memcpy HtoD (Pinned -> Device)",
    }
    told = [(r["start_ns"], r["device"], r["direction"], r["host_memory"], r["bytes"]) for r in rows[1:]]
    assert told == [
        (21_000, "cuda:1", "h2d", "pageable", 10),
        (31_001, "cuda:0", "d2h", "pageable", 11),
        (41_000, "cuda:0", "d2h", "pinned", 12),
    ]


def test_what_a_copy_does_not_tell_is_missing(tmp_path: Path) -> None:
    unnamed, unknown = copy("Memcpy HtoD", 1, device=0), copy("Memcpy DtoH (Device -> Unknown)", 2, device=0, stream=3)
    rows, trouble = copies.read([write(tmp_path / "copies-1.json", unnamed, unknown)], 0)
    assert trouble == []
    assert [(row["bytes"], row["host_memory"], row["stream"]) for row in rows] == [(None, None, None), (None, None, 3)]


def test_times_without_a_base_are_of_the_wall_clock_themselves(tmp_path: Path) -> None:
    path = write(tmp_path / "copies-1.json", copy("Memcpy HtoD (Pinned -> Device)", 5_000_000.5), base=None)
    ((row,), _) = copies.read([path], -5_000_000_000)
    assert (row["start_ns"], row["end_ns"]) == (500, 2_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"cat": "gpu_memcpy", "name": "Memcpy HtoD"',
        "",
        "[]",
        "{}",
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 1}]}',
        '{"traceEvents": [{"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": "soon", "dur": 1}]}',
    ],
)
def test_a_broken_file_is_one_line_of_trouble_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    broken = tmp_path / "copies-1.json"
    broken.write_text(text)
    whole = write(tmp_path / "copies-2.json", copy("Memcpy DtoH (Device -> Pinned)", 1, bytes=8))
    rows, trouble = copies.read([broken, tmp_path / "gone.json", whole], 0)
    assert [row["bytes"] for row in rows] == [8]
    assert len(trouble) == 2
    assert "copies-1.json" in trouble[0]
    assert "gone.json" in trouble[1]
    assert "\n" not in "".join(trouble)
