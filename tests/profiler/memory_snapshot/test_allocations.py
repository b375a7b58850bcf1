"""Lifetimes of blocks, compared with a simulated allocator."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.features.importers.source import Source
from ebbtide.features.importers.torch_memory.snapshot import import_snapshot
from ebbtide.profiler.memory_snapshot.allocations import allocation_rows, pool_timeline
from ebbtide.profiler.memory_snapshot.reader import Events, Snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import (
    ACTIONS,
    EVENT_COLUMNS,
    ROWS,
    TABLES,
)
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples
from tests.features.importers.torch_memory.made_snapshots import (
    START_US,
    event,
    job,
    segment,
)

ACTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 1 << 32), st.booleans(), st.booleans()),
    min_size=1,
    max_size=60,
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
    events = [
        event("alloc", 300, 1, 64),
        event("free_requested", 300, 5, 64),
        event("free_completed", 300, 9, 64),
    ]
    events += [
        event("alloc", 200, 10, 64),
        event("free_requested", 100, 11, 512),
        event("alloc", 50, 12, 1024),
    ]
    blocks = segment(4096, 200, 50)
    blocks["address"] = 64
    blocks["blocks"][0]["size"] = 1024 - 64
    trace = imported(
        tmp_path / "s.pickle", {"segments": [blocks], "device_traces": [events]}
    )
    rows = trace.allocations(0)
    ends = [
        None if value is None else value // 1000 - START_US
        for value in rows["end_ns"].astype(object).where(rows["end_ns"].notna(), None)
    ]
    assert list(
        zip(
            (rows["start_ns"] // 1000 - START_US).tolist(),
            ends,
            rows["bytes"].tolist(),
            strict=True,
        )
    ) == [
        (1, 11, 100),
        (1, 5, 300),
        (10, None, 200),
        (12, None, 50),
    ]


def snapshot_of(answer: IO[bytes], columns: dict[str, Any]) -> Snapshot:
    """Return a snapshot of events, which are written as the unpickler does."""
    count = len(columns["action"])
    for start in range(0, count, ROWS):
        for name, code in EVENT_COLUMNS.items():
            block = np.zeros(ROWS, code)
            rows = columns[name][start : start + ROWS]
            block[: len(rows)] = rows
            answer.write(block.tobytes())
    answer.flush()
    blocks, segments = (
        pd.DataFrame({name: np.empty(0, np.int64) for name in names})
        for names in TABLES.values()
    )
    return Snapshot(
        {0: Events(answer.fileno(), range(count))}, blocks, segments, ["a", "b"], []
    )


def test_allocation_rows__of_several_blocks_are_those_of_a_replay(
    tmp_path: Path,
) -> None:
    drawn = random.Random(7)
    count, now, times = ROWS + 20_000, 1000, []
    for _ in range(count):
        now += drawn.randrange(-2, 6)  # clocks of cores differ
        times.append(now)
    actions = [
        ACTIONS[drawn.choice(["alloc", "alloc", "free_completed", "oom"])]
        for _ in range(count)
    ]
    addresses, sizes = (
        [drawn.randrange(1, limit) for _ in range(count)] for limit in (2000, 1 << 30)
    )
    stacks = [drawn.randrange(-1, 2) for _ in range(count)]
    columns = {
        "action": actions,
        "time_us": times,
        "bytes": sizes,
        "address": addresses,
        "stack": stacks,
    }
    with (tmp_path / "answer").open("w+b") as answer:
        made = allocation_rows(snapshot_of(answer, columns), 0, start_ns=5)
    # The last event of each address: the row of an allocation, or None.
    latest_us, last, older, newer = times[0], {}, [], []
    for action, time_us, size, address, stack in zip(
        actions, times, sizes, addresses, stacks, strict=True
    ):
        if action == ACTIONS["oom"]:
            continue
        latest_us = max(latest_us, time_us)
        row = last.get(address)
        if row is not None:
            row["end_ns"] = latest_us * 1000
        last[address] = None
        if action == ACTIONS["alloc"]:
            last[address] = {
                "start_ns": latest_us * 1000,
                "end_ns": None,
                "bytes": size,
                "stack": stack,
            }
            newer.append(last[address])
        elif row is None:
            older.append(
                {"start_ns": 5, "end_ns": latest_us * 1000, "bytes": size, "stack": -1}
            )
    expected = pd.DataFrame([*older, *newer])
    assert made["end_ns"].equals(expected["end_ns"].astype("Int64"))
    assert made["stack"].cat.codes.tolist() == expected["stack"].tolist()
    assert made[["start_ns", "bytes"]].equals(expected[["start_ns", "bytes"]])


def test_allocation_rows__take_little_memory_of_many_events(tmp_path: Path) -> None:
    count = 18 * ROWS
    steps = np.arange(count)
    columns = {
        "action": steps % 2 * ACTIONS["free_completed"],
        "time_us": steps,
        "bytes": steps // 2 % 5000 * 512,
    }
    columns |= {"address": steps // 2 % 3000, "stack": steps % 2}
    with (tmp_path / "answer").open("w+b") as answer:
        snapshot = snapshot_of(answer, columns)
        tracemalloc.start()
        rows, timeline = (
            allocation_rows(snapshot, 0, 0),
            pool_timeline(snapshot, 0, "requested"),
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (len(rows), len(timeline.bytes)) == (count // 2, count + 2)
    assert int(timeline.bytes.max()) == 4999 * 512
    # The rows, and memory for those of blocks that were not in use: 52 B an event. All
    # events at once take 37 more.
    assert peak_bytes < 67 * count, peak_bytes / count


def test_allocator_state__tells_private_pools_and_memory_that_cannot_be_returned(
    tmp_path: Path,
) -> None:
    private = {**segment(8192, 1000), "segment_pool_id": (0, 3), "address": 1 << 20}
    empty = {**segment(2048), "address": 1 << 21}
    snapshot = {
        "segments": [segment(4096, 700, 600), private, empty],
        "device_traces": [[event("alloc", 700)]],
    }
    (state,) = imported(tmp_path / "s.pickle", snapshot).rank(0).allocators
    assert (state.device, state.segments, state.private_segments) == ("cuda:0", 3, 1)
    assert (state.reserved_bytes, state.private_bytes) == (4096 + 8192 + 2048, 8192)
    assert (state.allocated_bytes, state.requested_bytes) == (1024 + 1024 + 1024, 2300)
    assert state.inactive_bytes == (4096 - 2048) + (8192 - 1024)
    assert state.largest_free_bytes == 8192 - 1024
