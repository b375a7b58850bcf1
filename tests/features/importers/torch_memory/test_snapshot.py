"""Real and made memory snapshots, compared with a replay of their events."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.out_of_memory import out_of_memory
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.features.importers.torch_memory.snapshot import (
    SnapshotImporter,
    import_snapshot,
)
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples, seeded, slow_case
from tests.features.importers.torch_memory.made_snapshots import (
    START_US,
    Allocator,
    event,
    job,
    segment,
)

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "snapshots"
REAL = ["cs336-ctx128-forward.pickle", "snapviewer-memory.pickle"]


def import_files(*files: Path) -> Trace:
    builder = TraceBuilder()
    for number, file in enumerate(files):
        assert SnapshotImporter().matches(Source(file))
        import_snapshot(Source(file), builder, number)
    return builder.build()


def write_snapshot(path: Path, **parts: Any) -> Path:
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], **parts}))
    return path


def pool_sizes(
    trace: Trace, pool: str, device: str = "cuda:0", rank: int = 0
) -> list[tuple[int, int]]:
    """Return (Unix us, bytes) in order."""
    rows = trace.memory(rank)
    rows = rows[(rows["pool"] == pool) & (rows["device"] == device)]
    return list(zip(rows["t_ns"] // 1000, rows["bytes"], strict=True))


def real(name: str) -> Path:
    if not (PUBLISHED / name).exists():
        pytest.skip("the published measurements are not here (shared/published)")
    return PUBLISHED / name


ACTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 1 << 32), st.booleans(), st.booleans()),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(25, by_default=6))
@given(acts=ACTS, cut=st.floats(0, 0.99))
def test_import_snapshot__gives_the_exact_sizes(
    tmp_path_factory: pytest.TempPathFactory, acts: Any, cut: float
) -> None:
    allocator = job(acts)
    first = int(cut * len(allocator.events))
    path = write_snapshot(
        tmp_path_factory.mktemp("job") / "snapshot.pickle", **allocator.snapshot(first)
    )
    trace = import_files(path)
    # Where no release was asked for while recording, memory counts until its release is
    # completed.
    by_request = any(
        entry["action"] == "free_requested" for entry in allocator.events[first:]
    )
    requested = allocator.requested if by_request else allocator.active
    assert step(pool_sizes(trace, "requested")) == truth(allocator, requested, first)
    assert step(pool_sizes(trace, "reserved")) == truth(
        allocator, allocator.reserved, first
    )


def step(rows: list[tuple[int, int]]) -> dict[int, int]:
    """Return the bytes from each time on."""
    return {
        t: size
        for (t, size), following in zip(rows, [*rows[1:], (-1, 0)], strict=True)
        if following[0] != t
    }


def truth(allocator: Allocator, sizes: list[int], first: int) -> dict[int, int]:
    """Return the true bytes at each change, at the first event and at the last
    event."""
    times = [entry["time_us"] for entry in allocator.events]
    last = len(times) - 1
    before = [sizes[0], *sizes]
    return {
        times[n]: sizes[n]
        for n in range(first, last + 1)
        if n in (first, last) or sizes[n] != before[n]
    }


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("pool", ["requested", "reserved"])
def test_import_snapshot__agrees_with_a_replay_of_real_files(
    name: str, pool: str
) -> None:
    """The replay runs backwards, from the blocks at the end."""
    snapshot = pickle.loads(real(name).read_bytes())
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    if pool == "requested":
        up, down = (
            {"alloc"},
            {"free_requested" if "free_requested" in actions else "free_completed"},
        )
        blocks = [block for part in snapshot["segments"] for block in part["blocks"]]
        size = sum(
            block["requested_size"]
            for block in blocks
            if block["state"] == "active_allocated"
        )
    else:
        up, down = {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"}
        size = sum(part["total_size"] for part in snapshot["segments"])
    sizes = [size]
    for entry in reversed(snapshot["device_traces"][0]):
        size += entry["size"] * ((entry["action"] in down) - (entry["action"] in up))
        sizes.append(size)
    rows = pool_sizes(import_files(real(name)), pool)
    assert max(size for _, size in rows) == max(sizes)
    assert (rows[0][1], rows[-1][1]) == (sizes[-1], sizes[0])
    assert rows[0][0] == snapshot["device_traces"][0][0]["time_us"]


def test_import_snapshot__includes_memory_from_before_the_recording(
    tmp_path: Path,
) -> None:
    events = [
        event("alloc", 300, 0, 1),
        event("free_requested", 100, 5, 2),
        event("free_completed", 100, 5, 2),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle",
            segments=[segment(4096, 300, 700)],
            device_traces=[events],
        )
    )
    assert pool_sizes(trace, "requested")[:3] == [
        (START_US, 800),
        (START_US, 1100),
        (START_US + 5, 1000),
    ]
    assert pool_sizes(trace, "reserved") == [(START_US, 4096), (START_US + 5, 4096)]
    # Too little to say anything of.
    assert not any("for 0.0 MB" in note for note in trace.notes)


def test_import_snapshot__counts_memory_awaiting_free_as_torch_does(
    tmp_path: Path,
) -> None:
    """`allocated_bytes` falls with the request; with completed releases alone it is
    held until then."""
    segments = [segment(4096, 700), segment(4096, 600, state="active_awaiting_free")]
    both = [event("alloc", 600), event("free_requested", 600, 1)]
    trace = import_files(
        write_snapshot(
            tmp_path / "both.pickle", segments=segments, device_traces=[both]
        )
    )
    assert pool_sizes(trace, "requested")[-1] == (START_US + 1, 700)
    completed = [event("free_completed", 50), event("alloc", 600, 1)]
    trace = import_files(
        write_snapshot(
            tmp_path / "completed.pickle", segments=segments, device_traces=[completed]
        )
    )
    assert [size for _, size in pool_sizes(trace, "requested")] == [
        750,
        700,
        1300,
        1300,
    ]


def test_import_snapshot__has_every_device_the_busiest_first(tmp_path: Path) -> None:
    traces = [[], [event("alloc", 512)], [event("alloc", 512, n) for n in range(3)], []]
    segments = [
        segment(8192, device=3),
        segment(4096, 512, device=1),
        segment(4096, 512, 512, 512, device=2),
    ]
    trace = import_files(
        write_snapshot(tmp_path / "s.pickle", segments=segments, device_traces=traces)
    )
    assert [device.device for device in trace.rank(0).devices] == [
        "cuda:2",
        "cuda:1",
        "cuda:3",
    ]
    assert any(
        "has 3 devices: figures are of cuda:2, which has most events" in note
        for note in trace.notes
    )
    assert pool_sizes(trace, "requested", "cuda:1")[-1] == (START_US + 2, 512)
    assert pool_sizes(trace, "reserved", "cuda:3") == [
        (START_US, 8192),
        (START_US + 2, 8192),
    ]
    assert trace.rank(0).transfers_recorded is False


def test_import_snapshot__keeps_the_order_of_events_if_clocks_jump_back(
    tmp_path: Path,
) -> None:
    events = [
        event("alloc", 512, 9),
        event("alloc", 1024, 7),
        event("free_completed", 1024, 12),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]
        )
    )
    assert pool_sizes(trace, "requested") == [
        (START_US + 9, 0), (START_US + 9, 512), (START_US + 9, 1536), (START_US + 12, 512), (START_US + 12, 512)
    ]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_import_snapshot__of_torch_before_2_2_has_the_order_of_events_as_clock(
    name: str, tmp_path: Path
) -> None:
    snapshot = pickle.loads(real(name).read_bytes())
    for device in snapshot["device_traces"]:
        for entry in device:
            del entry["time_us"]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    trace, timed = (
        import_trace([tmp_path / "s.pickle"], tmp_path / "t.ebb"),
        import_files(real(name)),
    )
    for pool in ("requested", "reserved"):
        assert [size for _, size in pool_sizes(trace, pool)] == [
            size for _, size in pool_sizes(timed, pool)
        ]
    columns = ["bytes", "stack", "category"]
    assert trace.allocations(0)[columns].equals(timed.allocations(0)[columns])
    assert trace.span_ns() == (0, (len(snapshot["device_traces"][0]) - 1) * 1000)
    assert trace.meta.clock.name == "unknown"
    assert any(
        "has no times (torch records them since 2.2)" in note for note in trace.notes
    )


@pytest.mark.parametrize(
    "parts",
    [{"device_traces": [[], []]}, {"device_traces": [[event("snapshot", 0)]]}, {}],
)
def test_import_snapshot__without_events_has_the_state_at_its_end(
    tmp_path: Path, parts: Any
) -> None:
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096, 500), segment(8192)], **parts
        )
    )
    pools = {"requested": 500, "allocated": 512, "reserved": 12288}
    assert {pool: pool_sizes(trace, pool) for pool in pools} == {
        pool: [(0, size)] for pool, size in pools.items()
    }
    (state,) = trace.rank(0).allocators
    assert (state.segments, state.inactive_bytes, state.largest_free_bytes) == (
        2,
        4096 - 512,
        8192,
    )
    assert any(
        "torch.cuda.memory._record_memory_history()" in note for note in trace.notes
    )
    assert (trace.allocations(0).empty, trace.rank(0).out_of_memory) == (True, ())


def test_import_snapshot__of_old_torch_is_a_list_of_segments(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(pickle.dumps([segment(4096, 512)]))
    assert pool_sizes(import_files(tmp_path / "s.pickle"), "reserved") == [(0, 4096)]


def test_import_snapshot__refuses_one_without_events_and_memory(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no events and no memory"):
        import_files(write_snapshot(tmp_path / "s.pickle"))


def test_import_snapshot__has_the_holders_when_memory_ran_out(tmp_path: Path) -> None:
    events = [
        event("alloc", 512, addr=1),
        event("oom", 3 * 10**9, 10),
        event("free_requested", 512, 20, addr=1),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096)], device_traces=[events]
        )
    )
    error = out_of_memory(trace, 0)
    assert error is not None
    assert (error.record.requested_bytes, error.memory.pool, error.memory.bytes) == (
        3 * 10**9,
        "requested",
        512,
    )


def test_import_snapshot__has_no_timeline_without_releases(tmp_path: Path) -> None:
    events = [
        event("segment_alloc", 4096),
        event("alloc", 512),
        event("alloc", 1024, 1),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]
        )
    )
    assert pool_sizes(trace, "requested") == []
    assert (
        "s.pickle, cuda:0: no requested timeline: its releases were not recorded"
        in trace.notes
    )


def test_import_snapshot__notes_sizes_that_may_be_too_low(tmp_path: Path) -> None:
    events = [
        event("alloc", 512),
        event("alloc", 1024, 1),
        event("free_requested", 512, 2),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096)], device_traces=[events]
        )
    )
    assert [size for _, size in pool_sizes(trace, "requested")] == [
        0,
        512,
        1536,
        1024,
        1024,
    ]
    assert any("may be too low" in note for note in trace.notes)


def test_import_snapshot__notes_out_of_memory(tmp_path: Path) -> None:
    events = [
        event("alloc", 512),
        *(event("oom", 3 * 10**9, 10**6 * n) for n in range(5)),
    ]
    trace = import_files(
        write_snapshot(
            tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]
        )
    )
    assert (
        "s.pickle, cuda:0: out of memory at 2023-11-14 22:13:22 UTC, when 3.00 GB were "
        "requested" in trace.notes
    )
    assert "s.pickle, cuda:0: out of memory 2 more times" in trace.notes


def test_rank_of__comes_from_names_then_position(tmp_path: Path) -> None:
    parts = {"segments": [segment(4096, 512)], "device_traces": [[event("alloc", 512)]]}
    (tmp_path / "rank_5").mkdir()
    files = [
        tmp_path / name
        for name in (
            "a.pickle",
            "b.pickle",
            "rank-7_100.pickle",
            "rank_5/snapshot.pickle",
        )
    ]
    trace = import_files(*(write_snapshot(file, **parts) for file in files))
    assert trace.ranks == [0, 1, 5, 7]


@pytest.mark.parametrize(
    "entry",
    [
        {"size": -1},
        slow_case({"size": 1 << 50}),
        {"time_us": 1 << 60},
    ],
)
def test_import_snapshot__refuses_impossible_numbers(
    tmp_path: Path, entry: dict[str, int]
) -> None:
    events = [{**event("alloc", 512), **entry}]
    with pytest.raises(SourceError, match="is damaged"):
        import_files(
            write_snapshot(
                tmp_path / "s.pickle",
                segments=[segment(4096, 512)],
                device_traces=[events],
            )
        )


def test_import_snapshot__refuses_sums_that_would_overflow(tmp_path: Path) -> None:
    events = [event("alloc", (1 << 48) - 1, n) for n in range(1 << 15)]
    with pytest.raises(SourceError, match="add up to more than any device has"):
        import_files(write_snapshot(tmp_path / "s.pickle", device_traces=[events]))


@pytest.mark.parametrize("name", [*REAL, "made"])
def test_import_snapshot__reads_or_refuses_damaged_files(
    tmp_path: Path, name: str
) -> None:
    drawn = random.Random(name)
    acts = [
        (
            drawn.randrange(4),
            drawn.randrange(1, 1 << 30),
            False,
            bool(drawn.randrange(2)),
        )
        for _ in range(200)
    ]
    original = (
        pickle.dumps(job(acts).snapshot(0))
        if name == "made"
        else real(name).read_bytes()
    )
    path = tmp_path / "s.pickle"
    refusals = []
    for number in range(examples(40, by_default=8)):
        data = bytearray(original)
        with seeded(f"{name} {number}") as drawn:
            for _ in range(drawn.choice([1, 3, 30])):
                data[drawn.randrange(2, len(data))] = drawn.randrange(256)
            if drawn.random() < 0.2:
                del data[drawn.randrange(len(data)) :]
            path.write_bytes(
                gzip.compress(data, 1)[: -drawn.randrange(1, 100)]
                if drawn.random() < 0.2
                else data
            )
            try:
                assert np.all(import_files(path).memory(0)["bytes"] >= 0)
            except SourceError as refusal:
                refusals.append(str(refusal))
    assert refusals
    assert all(refusal.isprintable() for refusal in refusals)
