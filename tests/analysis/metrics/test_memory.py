"""Memory lines side by side, against what an integer clock tells tick by tick."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.memory import Memory, difference, memory_use
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

MS = 10**6
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 100}
PHASES = ("forward", "backward", "update")

samples = st.tuples(st.integers(0, 30), st.integers(0, 50))
line = st.lists(samples, min_size=1, max_size=12).map(lambda rows: sorted(rows, key=lambda row: row[0]))
apart = st.dictionaries(st.integers(0, 30), st.integers(0, 50), min_size=1, max_size=12).map(
    lambda rows: sorted(rows.items())
)


def train(rank: RankBuilder, iterations: int, gap: int = 0) -> None:
    """Iterations of `gap` ms of other and 10 ms a phase, from 0 on."""
    rank.meta["first_iteration_start_ns"] = 0
    for iteration in range(iterations):
        for place, phase in enumerate(PHASES):
            begin = ((30 + gap) * iteration + gap + 10 * place) * MS
            rank.phase(phase, begin, begin + 10 * MS, iteration)


def arrays(rows: list[tuple[int, int]]) -> Any:
    return tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))


def value(rows: list[tuple[int, int]], t: int) -> int | None:
    return next((v for at, v in reversed(rows) if at <= t), None)


def figures(found: Memory, what: str, rank: int = 0) -> dict[str, tuple[int, int]]:
    """(low, peak) per phase of a pool or a gap."""
    uses = [(u.rank, u.pool, u) for u in found.pools] + [(g.rank, g.gap, g) for g in found.gaps]
    return {use.phase: (use.low_bytes, use.peak_bytes) for r, name, use in uses if (r, name) == (rank, what)}


@given(line, line)
def test_the_difference_holds_at_every_moment(upper: Any, lower: Any) -> None:
    times, values = difference(arrays(upper), arrays(lower))
    assert (np.diff(times) > 0).all()
    rows = list(zip(times.tolist(), values.tolist(), strict=True))
    for t in range(32):
        above, below = value(upper, t), value(lower, t)
        exact = None if above is None or below is None else max(above - below, 0)
        assert value(rows, t) == exact


@given(apart, apart, st.integers(0, 4))
def test_each_phase_has_the_least_and_the_most_of_its_time(reserved: Any, allocated: Any, gap: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 1, gap)
    for pool, rows in (("reserved", reserved), ("allocated", allocated)):
        for t, size in rows:
            rank.memory(t * MS, size, pool)
    found = memory_use(builder.build())
    clock = ["other"] * gap + [phase for phase in PHASES for _ in range(10)]
    lines = {
        "reserved": lambda t: value(reserved, t),
        "allocated": lambda t: value(allocated, t),
        "free": lambda t: None if value(allocated, t) is None else 100 - value(allocated, t),
        "fragmentation": lambda t: (
            None
            if value(reserved, t) is None or value(allocated, t) is None
            else max(value(reserved, t) - value(allocated, t), 0)
        ),
    }
    for name, at in lines.items():
        expected = {}
        for phase in ("other", *PHASES):
            span = [t for t, now in enumerate(clock) if now == phase]
            # A phase ends with what its last moment brings.
            held = [v for t in (*span, span[-1] + 1) if (v := at(t)) is not None] if span else []
            if held:
                expected[phase] = (min(held), max(held))
        assert figures(found, name) == expected


def test_medians_are_over_the_counted_iterations() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 6)
    used = [99, 99, 10, 20, 30, 40]
    for iteration, size in enumerate(used):
        rank.memory(30 * iteration * MS, size, "device").memory((30 * iteration + 25) * MS, size + 5, "device")
    found = memory_use(builder.build())
    assert figures(found, "device")["backward"] == (median(used[2:]),) * 2
    # An update ends as the next iteration begins: with what that one has.
    assert figures(found, "device")["update"] == (25, 35)  # of 10 20 30 40 and of 20 30 40 45
    assert figures(found, "free")["backward"] == (75, 75)


def test_the_parts_of_a_phase_are_one() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0)
    for n, phase in enumerate(("forward", "backward", "forward", "backward", "update")):
        rank.phase(phase, 10 * n, 10 * n + 9, 0, n // 2).memory(10 * n, (30, 50, 40, 20, 10)[n])
    used = figures(memory_use(builder.build()), "device")
    assert used == {"forward": (30, 40), "backward": (20, 50), "update": (10, 10), "other": (10, 50)}


def test_gaps_are_those_of_lines_that_were_recorded() -> None:
    builder = TraceBuilder()
    for number, pools in enumerate((("device", "reserved"), ("allocated",), ("device", "reserved", "allocated"))):
        rank = builder.rank(number, devices=[{**DEVICE, "device": f"cuda:{number}"}])
        train(rank, 3)
        for pool in pools:
            size = {"device": 90, "reserved": 60, "allocated": 40}[pool]
            rank.memory(0, size, pool, f"cuda:{number}").memory(0, 1, pool, "cuda:9")
        rank.memory(0, 500, "rss", "cpu")
    found = memory_use(builder.build())
    gaps = {rank: {g.gap for g in found.gaps if g.rank == rank} for rank in range(3)}
    assert gaps == {0: {"outside torch", "free"}, 1: set(), 2: {"outside torch", "fragmentation", "free"}}
    assert figures(found, "outside torch", 2)["forward"] == (30, 30)
    assert figures(found, "fragmentation", 2)["forward"] == (20, 20)
    assert figures(found, "free", 2)["forward"] == (10, 10)
    assert figures(found, "rss", 1)["update"] == (500, 500)
    assert {use.rank for use in memory_use(builder.build(), [1]).pools} == {1}


def test_more_in_use_than_there_is_leaves_nothing_free() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    train(rank, 1)
    rank.memory(0, 130)
    assert figures(memory_use(builder.build()), "free")["forward"] == (0, 0)


@pytest.mark.parametrize("iterations", [0, 2])
def test_what_was_not_recorded_is_not_there(iterations: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{**DEVICE, "capacity_bytes": None}])
    train(rank, iterations)
    assert memory_use(builder.build()) == Memory([], [])
    rank.memory(0, 10)
    assert memory_use(builder.build()).gaps == []
    assert bool(memory_use(builder.build()).pools) == bool(iterations)
    assert memory_use(TraceBuilder().build()) == Memory([], [])
