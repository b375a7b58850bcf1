"""Lifetimes of blocks, compared with a simulated allocator."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.profiler.importers.source import Source
from ebbtide.profiler.importers.torch_memory.snapshot import import_snapshot
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples
from tests.profiler.importers.torch_memory.made_snapshots import START_US, event, job, segment

ACTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 1 << 32), st.booleans(), st.booleans()), min_size=1, max_size=60
)


def imported(path: Path, snapshot: dict[str, Any]) -> Trace:
    path.write_bytes(pickle.dumps(snapshot))
    builder = TraceBuilder()
    import_snapshot(Source(path), builder, 0)
    return builder.build()


@settings(max_examples=examples(25, by_default=5))
@given(acts=ACTS, cut=st.floats(0, 0.99))
def test_allocation_rows__add_up_to_the_requested_bytes_at_all_times(
    tmp_path_factory: pytest.TempPathFactory, acts: Any, cut: float
) -> None:
    allocator = job(acts)
    snapshot = allocator.snapshot(int(cut * len(allocator.events)))
    trace = imported(tmp_path_factory.mktemp("job") / "snapshot.pickle", snapshot)
    rows, memory = trace.allocations(0), trace.memory(0)
    requested = memory[memory["pool"] == "requested"].groupby("t_ns")["bytes"].last()
    for t_ns, size in requested.items():
        live = (rows["start_ns"] <= t_ns) & ~(rows["end_ns"] <= t_ns).fillna(False)
        assert rows["bytes"][live].sum() == size


def test_allocation_rows__end_at_the_request_of_the_release(tmp_path: Path) -> None:
    events = [event("alloc", 300, 1, 64), event("free_requested", 300, 5, 64), event("free_completed", 300, 9, 64)]
    events += [event("alloc", 200, 10, 64), event("free_requested", 100, 11, 512), event("alloc", 50, 12, 1024)]
    blocks = segment(4096, 200, 50)
    blocks["address"] = 64
    blocks["blocks"][0]["size"] = 1024 - 64
    trace = imported(tmp_path / "s.pickle", {"segments": [blocks], "device_traces": [events]})
    rows = trace.allocations(0)
    ends = [
        None if value is None else value // 1000 - START_US
        for value in rows["end_ns"].astype(object).where(rows["end_ns"].notna(), None)
    ]
    assert list(zip((rows["start_ns"] // 1000 - START_US).tolist(), ends, rows["bytes"].tolist(), strict=True)) == [
        (1, 11, 100),
        (1, 5, 300),
        (10, None, 200),
        (12, None, 50),
    ]


def test_allocator_state__tells_private_pools_and_memory_that_cannot_be_returned(tmp_path: Path) -> None:
    private = {**segment(8192, 1000), "segment_pool_id": (0, 3), "address": 1 << 20}
    empty = {**segment(2048), "address": 1 << 21}
    snapshot = {"segments": [segment(4096, 700, 600), private, empty], "device_traces": [[event("alloc", 700)]]}
    (state,) = imported(tmp_path / "s.pickle", snapshot).rank(0).allocators
    assert (state.device, state.segments, state.private_segments) == ("cuda:0", 3, 1)
    assert (state.reserved_bytes, state.private_bytes) == (4096 + 8192 + 2048, 8192)
    assert (state.allocated_bytes, state.requested_bytes) == (1024 + 1024 + 1024, 2300)
    assert state.inactive_bytes == (4096 - 2048) + (8192 - 1024)
    assert state.largest_free_bytes == 8192 - 1024
