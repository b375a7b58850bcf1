"""Memory snapshots against the events that they hold, real ones and made ones."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.importers.source import Source, SourceError
from ebbtide.profiler.importers.torch_memory import snapshot
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples, seeded
from tests.profiler.importers.torch_memory.made_snapshots import START_US, Allocator, event, job, segment

PUBLISHED = Path(__file__).parents[5] / "shared" / "published" / "snapshots"
REAL = ["cs336-ctx128-forward.pickle", "snapviewer-memory.pickle"]


def imported(*files: Path) -> Trace:
    builder = TraceBuilder()
    for number, file in enumerate(files):
        assert snapshot.matches(Source(file))
        snapshot.read(Source(file), builder, number)
    return builder.build()


def written(path: Path, **parts: Any) -> Path:
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], **parts}))
    return path


def line(trace: Trace, pool: str, device: str = "cuda:0", rank: int = 0) -> list[tuple[int, int]]:
    """(Unix us, bytes), in order."""
    rows = trace.memory(rank)
    rows = rows[(rows["pool"] == pool) & (rows["device"] == device)]
    return list(zip(rows["t_ns"] // 1000, rows["bytes"], strict=True))


def real(name: str) -> Path:
    if not (PUBLISHED / name).exists():
        pytest.skip("the published measurements are not beside this checkout")
    return PUBLISHED / name


ACTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 1 << 32), st.booleans(), st.booleans()), min_size=1, max_size=60
)


@given(acts=ACTS, cut=st.floats(0, 0.99))
def test_any_job_gives_its_true_lines(tmp_path_factory: pytest.TempPathFactory, acts: Any, cut: float) -> None:
    allocator = job(acts)
    first = int(cut * len(allocator.events))
    path = written(tmp_path_factory.mktemp("job") / "snapshot.pickle", **allocator.snapshot(first))
    trace = imported(path)
    # Where no release was asked for while recording, memory counts until its release is completed.
    by_request = any(entry["action"] == "free_requested" for entry in allocator.events[first:])
    requested = allocator.held if by_request else allocator.active
    assert step(line(trace, "requested")) == truth(allocator, requested, first)
    assert step(line(trace, "reserved")) == truth(allocator, allocator.reserved, first)


def step(rows: list[tuple[int, int]]) -> dict[int, int]:
    """The bytes from each time on."""
    return {t: size for (t, size), following in zip(rows, [*rows[1:], (-1, 0)], strict=True) if following[0] != t}


def truth(allocator: Allocator, sizes: list[int], first: int) -> dict[int, int]:
    """The same of what it really held, where it changed, at the first event and at the last."""
    times = [entry["time_us"] for entry in allocator.events]
    last = len(times) - 1
    before = [sizes[0], *sizes]
    return {times[n]: sizes[n] for n in range(first, last + 1) if n in (first, last) or sizes[n] != before[n]}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("pool", ["requested", "reserved"])
def test_real_snapshots_agree_with_a_replay_of_their_events(name: str, pool: str) -> None:
    """Replayed backwards, from the blocks at the end to the beginning."""
    told = pickle.loads(real(name).read_bytes())
    actions = [entry["action"] for entry in told["device_traces"][0]]
    if pool == "requested":
        up, down = {"alloc"}, {"free_requested" if "free_requested" in actions else "free_completed"}
        blocks = [block for part in told["segments"] for block in part["blocks"]]
        size = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    else:
        up, down = {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"}
        size = sum(part["total_size"] for part in told["segments"])
    sizes = [size]
    for entry in reversed(told["device_traces"][0]):
        size += entry["size"] * ((entry["action"] in down) - (entry["action"] in up))
        sizes.append(size)
    rows = line(imported(real(name)), pool)
    assert max(size for _, size in rows) == max(sizes)
    assert (rows[0][1], rows[-1][1]) == (sizes[-1], sizes[0])
    assert rows[0][0] == told["device_traces"][0][0]["time_us"]


def test_what_was_there_before_is_counted(tmp_path: Path) -> None:
    events = [event("alloc", 300, 0, 1), event("free_requested", 100, 5, 2), event("free_completed", 100, 5, 2)]
    trace = imported(written(tmp_path / "s.pickle", segments=[segment(4096, 300, 700)], device_traces=[events]))
    assert line(trace, "requested")[:3] == [(START_US, 800), (START_US, 1100), (START_US + 5, 1000)]
    assert line(trace, "reserved") == [(START_US, 4096), (START_US + 5, 4096)]
    assert any("0.0 MB for 0.0 MB" in note for note in trace.notes)


def test_memory_that_waits_for_another_stream_counts_as_torch_counts_it(tmp_path: Path) -> None:
    """`allocated_bytes` falls with the request; with completed releases alone it is held until then."""
    held = [segment(4096, 700), segment(4096, 600, state="active_awaiting_free")]
    both = [event("alloc", 600), event("free_requested", 600, 1)]
    trace = imported(written(tmp_path / "both.pickle", segments=held, device_traces=[both]))
    assert line(trace, "requested")[-1] == (START_US + 1, 700)
    completed = [event("free_completed", 50), event("alloc", 600, 1)]
    trace = imported(written(tmp_path / "completed.pickle", segments=held, device_traces=[completed]))
    assert [size for _, size in line(trace, "requested")] == [750, 700, 1300, 1300]


def test_every_device_is_told_the_busiest_first(tmp_path: Path) -> None:
    traces = [[], [event("alloc", 512)], [event("alloc", 512, n) for n in range(3)], []]
    segments = [segment(8192, device=3), segment(4096, 512, device=1), segment(4096, 512, 512, 512, device=2)]
    trace = imported(written(tmp_path / "s.pickle", segments=segments, device_traces=traces))
    assert [device["device"] for device in trace.rank(0)["devices"]] == ["cuda:2", "cuda:1", "cuda:3"]
    assert line(trace, "requested", "cuda:1")[-1] == (START_US + 2, 512)
    assert line(trace, "reserved", "cuda:3") == [(START_US, 8192), (START_US + 2, 8192)]
    assert trace.rank(0)["transfers_recorded"] is False


def test_a_packed_snapshot_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[[event("alloc", 512)]])
    packed = tmp_path / "s.pickle.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert line(imported(packed), "requested") == line(imported(path), "requested")


def test_clocks_that_jump_back_do_not_reorder_events(tmp_path: Path) -> None:
    events = [event("alloc", 512, 9), event("alloc", 1024, 7), event("free_completed", 1024, 12)]
    trace = imported(written(tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]))
    assert line(trace, "requested") == [
        (START_US + 9, 0), (START_US + 9, 512), (START_US + 9, 1536), (START_US + 12, 512), (START_US + 12, 512)
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [{"device_traces": [[], []]}, {"device_traces": [[event("snapshot", 0)]]}, {}])
def test_a_snapshot_without_events_says_how_to_record_them(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(SourceError, match=r"torch\.cuda\.memory\._record_memory_history\(\)"):
        imported(written(tmp_path / "s.pickle", segments=[segment(4096, 512)], **parts))


def test_a_snapshot_of_old_torch_has_no_events(tmp_path: Path) -> None:
    (tmp_path / "s.pickle").write_bytes(pickle.dumps([segment(4096, 512)]))
    with pytest.raises(SourceError, match="has no events"):
        imported(tmp_path / "s.pickle")


def test_releases_that_were_not_recorded_leave_no_line(tmp_path: Path) -> None:
    events = [event("segment_alloc", 4096), event("alloc", 512), event("alloc", 1024, 1)]
    trace = imported(written(tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]))
    assert line(trace, "requested") == []
    assert "s.pickle, cuda:0: no requested line: its releases were not recorded" in trace.notes


def test_a_recording_that_ended_before_the_snapshot_is_said_to_be_too_low(tmp_path: Path) -> None:
    events = [event("alloc", 512), event("alloc", 1024, 1), event("free_requested", 512, 2)]
    trace = imported(written(tmp_path / "s.pickle", segments=[segment(4096)], device_traces=[events]))
    assert [size for _, size in line(trace, "requested")] == [0, 512, 1536, 1024, 1024]
    assert any("may lie too low" in note for note in trace.notes)


def test_running_out_of_memory_is_noted(tmp_path: Path) -> None:
    events = [event("alloc", 512), *(event("oom", 3 * 10**9, 10**6 * n) for n in range(5))]
    trace = imported(written(tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]))
    assert "s.pickle, cuda:0: out of memory at 2023-11-14 22:13:22 UTC, when 3.00 GB were asked for" in trace.notes
    assert "s.pickle, cuda:0: out of memory 2 more times" in trace.notes


def test_ranks_come_from_names_else_from_the_order(tmp_path: Path) -> None:
    parts = {"segments": [segment(4096, 512)], "device_traces": [[event("alloc", 512)]]}
    (tmp_path / "rank_5").mkdir()
    files = [tmp_path / name for name in ("a.pickle", "b.pickle", "rank-7_100.pickle", "rank_5/snapshot.pickle")]
    trace = imported(*(written(file, **parts) for file in files))
    assert trace.ranks == [0, 1, 5, 7]


def test_two_snapshots_of_one_rank_are_refused(tmp_path: Path) -> None:
    parts = {"segments": [segment(4096, 512)], "device_traces": [[event("alloc", 512)]]}
    files = [written(tmp_path / name, **parts) for name in ("rank1.pickle", "other.pickle")]
    with pytest.raises(SourceError, match=r"rank1\.pickle and .*other\.pickle are both of rank 1"):
        imported(*files)


@pytest.mark.parametrize(
    "entry",
    [
        {"size": -1},
        {"size": 1 << 50},
        {"time_us": -1},
        {"time_us": 1 << 60},
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, entry: dict[str, int]) -> None:
    events = [{**event("alloc", 512), **entry}]
    with pytest.raises(SourceError, match="is damaged"):
        imported(written(tmp_path / "s.pickle", segments=[segment(4096, 512)], device_traces=[events]))


def test_sums_do_not_overflow(tmp_path: Path) -> None:
    events = [event("alloc", (1 << 48) - 1, n) for n in range(1 << 15)]
    with pytest.raises(SourceError, match="add up to more than any device has"):
        imported(written(tmp_path / "s.pickle", device_traces=[events]))


@pytest.mark.parametrize("name", [*REAL, "made"])
def test_damaged_snapshots_are_read_or_refused(tmp_path: Path, name: str) -> None:
    drawn = random.Random(name)
    acts = [(drawn.randrange(4), drawn.randrange(1, 1 << 30), False, bool(drawn.randrange(2))) for _ in range(200)]
    whole = pickle.dumps(job(acts).snapshot(0)) if name == "made" else real(name).read_bytes()
    path = tmp_path / "s.pickle"
    refusals = []
    for number in range(examples(40)):
        data = bytearray(whole)
        with seeded(f"{name} {number}") as drawn:
            for _ in range(drawn.choice([1, 3, 30])):
                data[drawn.randrange(2, len(data))] = drawn.randrange(256)
            if drawn.random() < 0.2:
                del data[drawn.randrange(len(data)) :]
            path.write_bytes(gzip.compress(data, 1)[: -drawn.randrange(1, 100)] if drawn.random() < 0.2 else data)
            try:
                assert np.all(imported(path).memory(0)["bytes"] >= 0)
            except SourceError as refusal:
                refusals.append(str(refusal))
    assert refusals
    assert all(refusal.isprintable() for refusal in refusals)
