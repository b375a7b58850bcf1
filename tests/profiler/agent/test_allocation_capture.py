"""Memory samples from the history of the CUDA allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ebbtide.profiler.agent.detailed_capture import AllocatorHistory, allocator_samples
from ebbtide.profiler.agent.memory_reader import REQUESTED, RESERVED
from ebbtide.profiler.agent.options import Options


def entry(action: str, size: int, time_us: int) -> dict[str, Any]:
    return {"action": action, "addr": 4096, "size": size, "stream": 0, "time_us": time_us, "device": 0}


def samples(trace: list[dict[str, Any]], requested: int = 0, reserved: int = 0) -> list[tuple[int, int, int]]:
    return list(allocator_samples(trace, requested, reserved))


def test_allocator_samples__are_none_for_an_empty_trace() -> None:
    assert samples([], 5, 10) == []


def test_allocator_samples__count_a_block_until_its_release_is_requested() -> None:
    trace = [entry("alloc", 100, 1), entry("free_requested", 100, 5), entry("free_completed", 100, 9)]
    assert samples(trace) == [(REQUESTED, 1_000, 100), (REQUESTED, 5_000, 0)]


def test_allocator_samples__count_segments_allocated_and_mapped() -> None:
    trace = [
        entry("segment_alloc", 2048, 1),
        entry("segment_map", 512, 2),
        entry("segment_unmap", 512, 3),
        entry("segment_free", 2048, 4),
    ]
    assert [size for _, _, size in samples(trace)] == [2048, 2560, 2048, 0]
    assert {pool for pool, _, _ in samples(trace)} == {RESERVED}


def test_allocator_samples__include_blocks_from_before_the_history() -> None:
    trace = [
        entry("segment_alloc", 2048, 1),
        entry("alloc", 300, 2),
        entry("free_requested", 1000, 3),  # a block from before
        entry("free_completed", 1000, 4),
        entry("alloc", 50, 5),
    ]
    assert samples(trace, requested=5350, reserved=10_048) == [
        (RESERVED, 1_000, 10_048),
        (REQUESTED, 2_000, 6300),
        (REQUESTED, 3_000, 5300),
        (REQUESTED, 5_000, 5350),
    ]


def test_allocator_samples__ignore_other_events() -> None:
    trace = [entry("alloc", 7, 1), entry("snapshot", 0, 2), entry("oom", 99, 3), entry("user_defined", 1, 4)]
    assert samples(trace, requested=7) == [(REQUESTED, 1_000, 7)]


def test_allocator_history__agrees_with_the_readings() -> None:
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
    requested: list[int] = []
    recorder: Any = SimpleNamespace(
        put=lambda kind, pool, device, x, y: requested.append(y) if pool == REQUESTED else None,
    )
    history = AllocatorHistory(recorder, torch, Options(allocator_iterations=1))
    history.enter_iteration(2)
    history.enter_iteration(3)
    assert requested == [1700, 700]
