"""Memory pools and gaps, against direct counts per tick of an integer clock."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.memory import MemoryUse, difference, memory_use
from ebbtide.analysis.tables.memory import memory_view
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

MS = 10**6
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 100}

samples = st.tuples(st.integers(0, 30), st.integers(0, 50))
timeline = st.lists(samples, min_size=1, max_size=12).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)
distinct_times = st.dictionaries(
    st.integers(0, 30), st.integers(0, 50), min_size=1, max_size=12
).map(lambda rows: sorted(rows.items()))


def train(rank: RankBuilder, iterations: int, gap: int = 0) -> None:
    """Add iterations with `gap` ms of `other` and 10 ms a phase, from 0 on."""
    rank.meta["first_iteration_start_ns"] = 0
    for iteration in range(iterations):
        for index, phase in enumerate(PHASES):
            begin = ((30 + gap) * iteration + gap + 10 * index) * MS
            rank.phase(phase, begin, begin + 10 * MS, iteration)


def arrays(rows: list[tuple[int, int]]) -> Any:
    return tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))


def value(rows: list[tuple[int, int]], t: int) -> int | None:
    return next((v for time, v in reversed(rows) if time <= t), None)


def figures(
    result: MemoryUse, name_of_use: str, rank: int = 0
) -> dict[str, tuple[int, int]]:
    """Return (low, peak) per phase of a pool or a gap."""
    uses = [(u.rank, u.pool, u) for u in result.pools] + [
        (g.rank, g.gap, g) for g in result.gaps
    ]
    return {
        use.phase: (use.low_bytes, use.peak_bytes)
        for r, name, use in uses
        if (r, name) == (rank, name_of_use)
    }


@given(timeline, timeline)
def test_difference__is_exact_at_every_moment(upper: Any, lower: Any) -> None:
    times, values = difference(arrays(upper), arrays(lower))
    assert (np.diff(times) > 0).all()
    rows = list(zip(times.tolist(), values.tolist(), strict=True))
    for t in range(32):
        above, below = value(upper, t), value(lower, t)
        exact = None if above is None or below is None else max(above - below, 0)
        assert value(rows, t) == exact


@given(distinct_times, distinct_times, st.integers(0, 4))
def test_memory_use__has_low_and_peak_of_each_phase(
    reserved: Any, allocated: Any, gap: int
) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 1, gap)
    for pool, rows in (("reserved", reserved), ("allocated", allocated)):
        for t, size in rows:
            rank.memory(t * MS, size, pool)
    result = memory_use(builder.build())
    clock = ["other"] * gap + [phase for phase in PHASES for _ in range(10)]
    values = {
        "reserved": lambda t: value(reserved, t),
        "allocated": lambda t: value(allocated, t),
        "free": lambda t: (
            None if value(reserved, t) is None else 100 - value(reserved, t)
        ),
        "fragmentation": lambda t: (
            None
            if value(reserved, t) is None or value(allocated, t) is None
            else max(value(reserved, t) - value(allocated, t), 0)
        ),
    }
    for name, value_at in values.items():
        expected = {}
        for phase in ("other", *PHASES):
            span = [t for t, now in enumerate(clock) if now == phase]
            # A sample at the end of a phase belongs to it.
            sizes = (
                [v for t in (*span, span[-1] + 1) if (v := value_at(t)) is not None]
                if span
                else []
            )
            if sizes:
                expected[phase] = (min(sizes), max(sizes))
        assert figures(result, name) == expected


def test_memory_use__medians_are_over_steady_iterations() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 6)
    used = [99, 99, 10, 20, 30, 40]
    for iteration, size in enumerate(used):
        rank.memory(30 * iteration * MS, size, "device").memory(
            (30 * iteration + 25) * MS, size + 5, "device"
        )
    result = memory_use(builder.build())
    assert figures(result, "device")["backward"] == (median(used[2:]),) * 2
    # A sample at the start of the next iteration belongs to the end of the update.
    # of 10 20 30 40 and of 20 30 40 45
    assert figures(result, "device")["update"] == (25, 35)
    assert figures(result, "free")["backward"] == (75, 75)


def test_memory_use__merges_micro_steps_of_a_phase() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0)
    for n, phase in enumerate(("forward", "backward", "forward", "backward", "update")):
        rank.phase(phase, 10 * n, 10 * n + 9, 0, n // 2).memory(
            10 * n, (30, 50, 40, 20, 10)[n]
        )
    used = figures(memory_use(builder.build()), "device")
    assert used == {
        "forward": (30, 40),
        "backward": (20, 50),
        "update": (10, 10),
        "other": (10, 50),
    }


def test_memory_use__has_gaps_of_recorded_pools() -> None:
    builder = TraceBuilder()
    for number, pools in enumerate(
        (("device", "reserved"), ("allocated",), ("device", "reserved", "allocated"))
    ):
        rank = builder.rank(number, devices=[{**DEVICE, "device": f"cuda:{number}"}])
        train(rank, 3)
        for pool in pools:
            size = {"device": 90, "reserved": 60, "allocated": 40}[pool]
            rank.memory(0, size, pool, f"cuda:{number}").memory(0, 1, pool, "cuda:9")
        rank.memory(0, 500, "rss", "cpu")
    result = memory_use(builder.build())
    gaps = {rank: {g.gap for g in result.gaps if g.rank == rank} for rank in range(3)}
    assert gaps == {
        0: {"outside torch", "free"},
        1: set(),
        2: {"outside torch", "fragmentation", "free"},
    }
    assert figures(result, "outside torch", 2)["forward"] == (30, 30)
    assert figures(result, "fragmentation", 2)["forward"] == (20, 20)
    assert figures(result, "free", 2)["forward"] == (10, 10)
    assert figures(result, "rss", 1)["update"] == (500, 500)
    assert {use.rank for use in memory_use(builder.build(), [1]).pools} == {1}


def test_memory_view__says_how_much_is_missing() -> None:
    builder = TraceBuilder("predicted")
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 3)
    rank.memory(0, 130, "reserved")
    trace = builder.build()
    answer = next(memory_view(trace, memory_use(trace), verbose=False))
    assert str(answer).endswith("; 30 B are missing")


@pytest.mark.parametrize("iterations", [0, 2])
def test_memory_use__is_empty_without_records(iterations: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{**DEVICE, "capacity_bytes": None}])
    train(rank, iterations)
    assert memory_use(builder.build()) == MemoryUse([], [])
    rank.memory(0, 10)
    assert memory_use(builder.build()).gaps == []
    # Without iterations, figures are of the whole trace.
    assert {use.phase is None for use in memory_use(builder.build()).pools} == {
        not iterations
    }
    assert memory_use(TraceBuilder().build()) == MemoryUse([], [])
