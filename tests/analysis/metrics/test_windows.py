"""Windows of free memory, against direct counts per tick of an integer clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_capacity
from ebbtide.analysis.metrics.windows import Window, find_windows
from ebbtide.analysis.tables.windows import windows_view
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import ebbtide_in_process

MS = 1_000_000
CAPACITY = 100
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": CAPACITY}


def built(
    lengths: list[tuple[int, int, int, int]],
    samples: dict[int, int],
    copies: Any = (),
    **device: Any,
) -> Trace:
    """A trace of iterations of `other`, forward, backward and update of so many ms,
    with memory and h2d copies."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{**DEVICE, **device}], first_iteration_start_ns=0)
    now = 0
    for iteration, (other, *phases) in enumerate(lengths):
        now += other
        for phase, length in zip(
            ("forward", "backward", "update"), phases, strict=True
        ):
            rank.phase(phase, now * MS, (now + length) * MS, iteration)
            now += length
    for t, used in samples.items():
        rank.memory(t * MS, used)
    for start, end in copies:
        rank.transfer("h2d", start * MS, end * MS, 1)
    return builder.build()


def absolute(trace: Trace, windows: list[Window]) -> list[tuple[int, int, Window]]:
    """Windows with their start and end in ms of the trace."""
    ends = trace.phases(0).groupby("iteration")["end_ns"].max() // MS
    placed = []
    for w in windows:
        origin = 0 if not w.iteration else int(ends[w.iteration - 1])
        placed.append((round(w.start_ms) + origin, round(w.end_ms) + origin, w))
    return placed


def phase_at(lengths: list[tuple[int, int, int, int]]) -> list[tuple[int, str]]:
    """(iteration, phase) of each ms."""
    names = ("other", "forward", "backward", "update")
    return [
        (n, name)
        for n, row in enumerate(lengths)
        for name, length in zip(names, row, strict=True)
        for _ in range(length)
    ]


iterations = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)
    ),
    min_size=1,
    max_size=4,
)
memory = st.dictionaries(
    st.integers(0, 60), st.integers(0, CAPACITY), min_size=1, max_size=25
)
intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=8,
)


@given(iterations, memory, st.integers(1, CAPACITY), intervals)
def test_find_windows__covers_every_free_moment_exactly(
    lengths: Any, samples: dict[int, int], min_bytes: int, copies: Any
) -> None:
    trace = built(lengths, samples, copies)
    trace.raw_meta["ranks"][0]["transfers_recorded"] = True
    clock = phase_at(lengths)
    first = min(samples)
    free = [
        CAPACITY - samples[max(s for s in samples if s <= t)] if t >= first else None
        for t in range(len(clock))
    ]
    covered = [False] * len(clock)
    placed = absolute(trace, find_windows(trace, min_bytes).windows)
    for start, end, window in placed:
        assert {clock[t] for t in range(start, end)} == {
            (window.iteration, window.phase)
        }
        assert min(free[t] for t in range(start, end)) == window.free_bytes >= min_bytes
        busy = sum(any(a <= t < b for a, b in copies) for t in range(start, end))
        assert window.h2d_idle_share == pytest.approx(1 - busy / (end - start))
        assert 0 <= window.h2d_idle_share <= 1
        assert window.d2h_idle_share == 1
        for t in range(start, end):
            assert not covered[t]
            covered[t] = True
    # No moment with enough free is left out, and no two windows of one phase touch.
    assert covered == [f is not None and f >= min_bytes for f in free]
    for (_, end, one), (start, _, two) in pairwise(placed):
        assert end < start or (one.iteration, one.phase) != (two.iteration, two.phase)


def test_guaranteed__excludes_phase_missing_in_one_iteration() -> None:
    trace = built([(0, 10, 10, 10), (0, 10, 10, 10)], {0: 0})
    rows = trace.phases(0)
    lacking = TraceBuilder()
    rank = lacking.rank(0, devices=[DEVICE]).memory(0, 0)
    for row in rows[
        ~((rows["iteration"] == 1) & (rows["phase"] == "backward"))
    ].itertuples():
        rank.phase(row.phase, row.start_ns, row.end_ns, row.iteration)
    assert {w.phase for w in find_windows(lacking.build(), 1).guaranteed} == {
        "forward",
        "update",
    }


def test_guaranteed__keeps_other_that_only_first_iteration_lacks() -> None:
    # 4 ms between forward and backward in each; from the second iteration on also 6 ms
    # before the forward.
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE]).memory(0, 0)
    for iteration, begin in enumerate((0, 40, 80)):
        edges = [begin, begin + 10, begin + 14, begin + 24, begin + 34]
        rank.phase("forward", edges[0] * MS, edges[1] * MS, iteration).phase(
            "backward", edges[2] * MS, edges[3] * MS, iteration
        )
        rank.phase("update", edges[3] * MS, edges[4] * MS, iteration)
    result = find_windows(builder.build(), 1).guaranteed
    assert [(w.phase, w.start_ms, w.end_ms) for w in result] == [
        ("other", 0, 6),
        ("forward", 6, 16),
        ("other", 16, 20),
        ("backward", 20, 30),
        ("update", 30, 40),
    ]


def test_find_windows__idle_shares_come_from_counters_and_link_peak() -> None:
    trace = built([(0, 10, 10, 10)], {0: 0}, link={"peak_bytes_per_s": 1e9})
    builder = TraceBuilder()
    rank = builder.rank(
        0, **{k: v for k, v in trace.raw_meta["ranks"][0].items() if k != "rank"}
    )
    rank.memory(0, 0)
    for phase, begin in (("forward", 0), ("backward", 10), ("update", 20)):
        rank.phase(phase, begin * MS, (begin + 10) * MS, 0)
    for t, rate in ((10, 0.25e9), (20, 1e9), (30, 2e9)):
        rank.link(t * MS, 10 * MS, "gpm", h2d_bytes_per_s=rate)
    shares = [
        (w.h2d_idle_share, w.d2h_idle_share)
        for w in find_windows(builder.build(), 1).windows
    ]
    # A sample above the link's peak is rejected: the update's idle share is not known.
    assert shares == [
        (pytest.approx(0.75), None),
        (pytest.approx(0.0), None),
        (None, None),
    ]


def test_find_windows__idle_shares_are_none_without_link_records() -> None:
    (window,) = find_windows(built([(0, 9, 9, 9)], {0: 60, 9: 99}), 40).windows
    assert (window.h2d_idle_share, window.d2h_idle_share) == (None, None)


def test_find_windows__trace_without_phases_counts_from_its_start() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[DEVICE]).memory(5 * MS, 90).memory(7 * MS, 10).memory(
        9 * MS, 90
    ).memory(11 * MS, 10)
    (window,) = find_windows(builder.build(), 50).windows
    assert (window.iteration, window.phase) == (None, None)
    assert (window.start_ms, window.end_ms) == (2.0, 4.0)


def test_find_windows__says_what_was_not_recorded() -> None:
    without_memory = find_windows(built([(0, 1, 1, 1)], {}), 1)
    assert (
        without_memory.pool,
        without_memory.windows,
        without_memory.known_ranks,
    ) == (None, [], [])
    assert without_memory.missing == [NO_MEMORY]
    without_capacity = find_windows(
        built([(0, 1, 1, 1)], {0: 0}, capacity_bytes=None), 1
    )
    assert (without_capacity.windows, without_capacity.known_ranks) == ([], [])
    assert without_capacity.missing == [no_capacity(0)]


def on_cpu() -> TraceBuilder:
    builder = TraceBuilder()
    cpu = {"device": "cpu", "kind": "cpu", "capacity_bytes": 4 << 30, "link": None}
    rank = builder.rank(0, devices=[cpu]).memory(0, 1 << 30, "heap", "cpu")
    for iteration in range(2):
        rank.phase("forward", iteration * 10 * MS, (iteration * 10 + 5) * MS, iteration)
    return builder


def test_find_windows__host_memory_has_no_room_for_optimizer_state(
    tmp_path: Path,
) -> None:
    on_cpu().write(tmp_path / "cpu.ebb")
    printed = json.loads(
        ebbtide_in_process("windows", tmp_path / "cpu.ebb", "--json").stdout
    )
    assert (printed["memory"], printed["pool"], printed["capacity_bytes"]) == (
        "host",
        "heap",
        4 << 30,
    )
    assert printed["windows"]
    assert {
        (w["resident_params"], w["streamed_params"]) for w in printed["windows"]
    } == {(None, None)}
    shown = ebbtide_in_process("windows", tmp_path / "cpu.ebb").stdout
    assert (
        "1.00 GiB of host memory free, of 4.00 GiB (host memory minus this job's heap)"
        in shown
    )
    assert not {"fits", "streams", "idle", "capacity", "device"} & set(shown.split())
    assert "never 1.82 TiB free: the host is smaller" in (
        ebbtide_in_process("windows", tmp_path / "cpu.ebb", "--min-bytes", "2TB").stdout
    )


def test_find_windows__uses_memory_and_link_of_each_rank() -> None:
    builder = TraceBuilder()
    for number, used in ((0, 10), (3, 60)):
        device = {
            **DEVICE,
            "device": f"cuda:{number}",
            "link": {"peak_bytes_per_s": 1e9},
        }
        rank = builder.rank(
            number,
            devices=[device],
            first_iteration_start_ns=0,
            transfers_recorded=True,
        )
        for iteration in range(2):
            for index, phase in enumerate(("forward", "backward", "update")):
                begin = (30 * iteration + 10 * index) * MS
                rank.phase(phase, begin, begin + 10 * MS, iteration)
        rank.memory(0, used, device=f"cuda:{number}")
    builder.rank(3).transfer("h2d", 20 * MS, 24 * MS, 1, device="cuda:3")
    result = find_windows(builder.build(), 40)
    assert {w.rank for w in result.windows} == {0, 3}
    assert [w.free_bytes for w in result.windows] == [90] * 6 + [40] * 6
    shares = {(w.rank, w.iteration, w.phase): w.h2d_idle_share for w in result.windows}
    assert shares.pop((3, 0, "update")) == pytest.approx(0.6)
    assert set(shares.values()) == {1.0}
    # The update of the first iteration is the busiest: 60 % of 10 ms at 1 GB/s, 12
    # bytes a parameter.
    update = next(w for w in result.guaranteed if (w.rank, w.phase) == (3, "update"))
    assert (update.resident_params, update.streamed_params) == (3, int(0.6 * 10e6 / 12))
    assert {w.rank for w in find_windows(builder.build(), 41).windows} == {0}
    assert find_windows(builder.build(), 40, [3]).windows == result.windows[6:]


def test_find_windows__names_pool_and_ranks_without_memory(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for number in range(2):
        device = {**DEVICE, "device": f"cuda:{number}"}
        builder.rank(number, devices=[device], first_iteration_start_ns=0).phase(
            "forward", 0, 10 * MS, 0
        )
    builder.rank(0).memory(0, 20, "allocated").memory(0, 60, "reserved")
    result = find_windows(builder.build(), 30)
    assert (result.pool, result.unrecorded_ranks) == ("reserved", [1])
    assert [(w.rank, w.free_bytes) for w in result.windows] == [(0, 40)]
    assert find_windows(builder.build(), 50).windows == []
    path = tmp_path / "t.ebb"
    builder.write(path)
    printed = json.loads(
        ebbtide_in_process(
            "windows", path, "--min-bytes", "30", "--rank", "1", "--json"
        ).stdout
    )
    assert (printed["pool"], printed["windows"], printed["unrecorded_ranks"]) == (
        "reserved",
        [],
        [1],
    )
    shown = ebbtide_in_process(
        "windows", path, "--min-bytes", "30", "--rank", "1"
    ).stdout
    assert "rank 1: reserved memory was not recorded" in shown
    assert "never" not in shown
    assert (
        "capacity minus reserved"
        in ebbtide_in_process("windows", path, "--min-bytes", "30").stdout
    )


def test_find_windows__keeps_nanoseconds_of_wall_clock_times() -> None:
    start = 1_700_000_000_000_000_003
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=start).memory(
        start + 7, 0
    )
    rank.phase("forward", start, start + 20, 0).memory(start + 18, 99)
    (window,) = find_windows(builder.build(), 50).windows
    assert (window.start_ms * MS, window.end_ms * MS) == (
        pytest.approx(7),
        pytest.approx(18),
    )


def test_find_windows__separates_micro_steps() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0).memory(0, 0)
    now = 0
    for iteration in range(3):
        for micro_step in range(2):
            for phase in ("forward", "backward"):
                rank.phase(phase, now, now + 5 * MS, iteration, micro_step)
                now += 5 * MS
        rank.phase("update", now, now + 5 * MS, iteration, 1)
        now += 5 * MS
    result = find_windows(builder.build(), 1)
    assert len(result.windows) == 15
    assert [w.phase for w in result.guaranteed] == [
        "forward",
        "backward",
        "forward",
        "backward",
        "update",
    ]
    assert [w.start_ms for w in result.guaranteed] == [0, 5, 10, 15, 20]


def test_windows__say_when_memory_is_free_throughout_the_iteration() -> None:
    always = built([(0, 9, 9, 9)], {0: 60, 9: 70})
    lines = [str(part) for part in windows_view(always, find_windows(always, 10))]
    assert any("Free throughout the iteration: 30 B" in line for line in lines), lines
    at_times = built([(0, 9, 9, 9)], {0: 60, 9: 99})
    assert not any(
        "throughout" in str(part)
        for part in windows_view(at_times, find_windows(at_times, 40))
    )


def test_windows__are_on_the_clock_of_the_gpu_as_the_summary() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0)
    for iteration in range(6):
        # The host launches within 4 ms what the GPU takes 100 ms for, but waits in the
        # update of iterations to warm up.
        start = iteration * 100
        for number, (phase, gpu) in enumerate(
            (("forward", (0, 30)), ("backward", (30, 80)), ("update", (80, 100)))
        ):
            host_end = start + (
                90 if phase == "update" and iteration < 2 else number + 1
            )
            times = (start + number) * MS, host_end * MS, iteration
            rank.phase(
                phase,
                *times,
                gpu_start_ns=(start + gpu[0]) * MS,
                gpu_end_ns=(start + gpu[1]) * MS,
            )
        # Halfway through the launches of the backward.
        rank.memory(start * MS, 20).memory(int((start + 1.5) * MS), 60).memory(
            (start + 2) * MS, 20
        )
    metrics = JobMetrics(builder.build())
    windows = metrics.windows(50).guaranteed
    assert [(one.phase, one.start_ms, one.end_ms) for one in windows] == [
        ("forward", 0, 30),
        ("backward", 30, 55),
        ("update", 80, 100),
    ]
    assert {row.phase: row.median_ms for row in metrics.summary().phases}[
        "forward"
    ] == 30
    first = metrics.windows(50).windows[0]
    assert (first.phase, first.start_ms, first.end_ms) == ("forward", 0, 30)
