"""Lines from allocator traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ebbtide.profiler.agent.detailed_capture import AllocatorHistory, allocator_lines
from ebbtide.profiler.agent.memory_reader import REQUESTED, RESERVED
from ebbtide.profiler.agent.options import Options


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
