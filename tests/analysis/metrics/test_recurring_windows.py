"""What every iteration has at the same place, held against each iteration for itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.recurring_windows import Place, _lowest, by_place
from ebbtide.analysis.metrics.windows import find_windows, pieces
from ebbtide.analysis.timeseries.thresholds import FreeLine
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
CAPACITY = 100
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": CAPACITY}
PHASES = ("forward", "backward", "update")

# The value that a step function has from each of so many places of a grid on; None: it goes on as before.
steps = st.lists(st.one_of(st.none(), st.integers(-50, 50)), min_size=12, max_size=12)
# ms of other, forward, backward and update
iteration = st.tuples(st.integers(0, 4), *[st.integers(1, 7)] * 3)
iterations = st.lists(iteration, min_size=1, max_size=5)
memory = st.dictionaries(st.integers(0, 80), st.integers(0, CAPACITY), min_size=1, max_size=40)


def built(lengths: list[tuple[int, ...]], samples: dict[int, int]) -> Trace:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0)
    now = 0
    for iteration, (other, *phases) in enumerate(lengths):
        now += other
        for phase, length in zip(PHASES, phases, strict=True):
            rank.phase(phase, now * MS, (now + length) * MS, iteration)
            now += length
    for t, used in samples.items():
        rank.memory(t * MS, used)
    return builder.build()


@given(st.lists(st.tuples(st.integers(-50, 50), steps), min_size=1, max_size=7))
def test_the_lowest_of_step_functions_is_the_minimum_on_a_fine_grid(functions: list[tuple[int, Any]]) -> None:
    envelopes = []
    tables = []
    for start, values in functions:
        values = [start, *values]
        at = [n for n, value in enumerate(values) if value is not None]
        envelopes.append((np.array(at) / 13, np.array([values[n] for n in at], np.int64)))
        tables.append([values[max(m for m in at if m <= n)] for n in range(13)])
    places, lowest = _lowest(envelopes)
    assert places[0] == 0
    assert (np.diff(places) > 0).all()
    for n in range(13):
        value = lowest[np.searchsorted(places, (n + 0.5) / 13, side="right") - 1]
        assert value == min(table[n] for table in tables)


@given(iterations, memory, st.integers(1, CAPACITY))
def test_every_iteration_has_what_is_guaranteed(lengths: Any, samples: dict[int, int], least: int) -> None:
    trace = built(lengths, samples)
    found = find_windows(trace, least)
    ends = trace.phases(0).groupby("iteration")["end_ns"].max().to_numpy() // MS
    own = []
    for window in found.windows:
        assert window.iteration is not None
        origin = int(ends[window.iteration - 1]) if window.iteration else 0
        own.append((window.phase, origin + window.start_ms, origin + window.end_ms))
    line = FreeLine(np.array(sorted(samples)) * MS, np.array([CAPACITY - samples[t] for t in sorted(samples)]))
    promised = []
    for place in by_place(pieces(trace, 0, line)):
        assert len(place.starts) >= len(lengths) - (place.phase == "other")
        for begins, until, free in place.windows(line, least):
            assert 0 <= begins < until <= 1
            assert free >= least
            times = (place.start_ns + place.length_ns * x for x in (begins, until))
            promised.append((place.phase, free, *(t / MS for t in times)))
            for start, end in zip(place.starts / MS, place.ends / MS, strict=True):
                first, last = start + begins * (end - start), start + until * (end - start)
                around = [w for w in own if w[0] == place.phase and w[1] <= first + 1e-6 and last <= w[2] + 1e-6]
                assert len(around) == 1
                # Nowhere in it does this iteration have less than is promised.
                for t in range(math.floor(first + 1e-6), math.ceil(last - 1e-6)):
                    assert CAPACITY - samples[max(s for s in samples if s <= t)] >= free
    assert promised == [(w.phase, w.free_bytes, w.start_ms, w.end_ms) for w in found.guaranteed]


@given(st.lists(iteration, min_size=1, max_size=1), memory, st.integers(1, CAPACITY))
def test_one_iteration_guarantees_what_it_has(lengths: Any, samples: dict[int, int], least: int) -> None:
    found = find_windows(built(lengths, samples), least)
    figures = [
        [(w.phase, pytest.approx(w.start_ms), pytest.approx(w.end_ms), w.free_bytes, w.h2d_idle_share) for w in windows]
        for windows in (found.windows, found.guaranteed)
    ]
    assert figures[0] == figures[1]


def test_the_share_is_that_of_the_iteration_in_which_the_link_is_busiest() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0).memory(0, 0)
    for iteration, busy in enumerate((1, 4, 2)):
        begin = iteration * 30 * MS
        for place, phase in enumerate(PHASES):
            rank.phase(phase, begin + place * 10 * MS, begin + (place + 1) * 10 * MS, iteration)
        rank.transfer("h2d", begin + 20 * MS, begin + (20 + busy) * MS, 1)
    shares = {w.phase: w.h2d_idle_share for w in find_windows(builder.build(), 1).guaranteed}
    assert shares == {"forward": 1.0, "backward": 1.0, "update": 0.6}


def test_the_typical_iteration_has_phases_of_median_length() -> None:
    found = find_windows(built([(0, 1, 6, 4), (0, 2, 7, 4), (0, 9, 20, 5)], {0: 0}), 1).guaranteed
    assert [(w.phase, w.start_ms, w.end_ms) for w in found] == [
        ("forward", 0, 2),
        ("backward", 2, 9),
        ("update", 9, 13),
    ]


def test_of_samples_at_one_time_the_last_holds() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0).phase("forward", 0, 9 * MS, 0)
    for t, used in ((0, 0), (3, 95), (3, 10), (6, 0), (6, 90)):
        rank.memory(t * MS, used)
    found = find_windows(builder.build(), 50)
    for windows in (found.windows, found.guaranteed):
        assert [(w.start_ms, pytest.approx(w.end_ms), w.free_bytes) for w in windows] == [(0, 6, 90)]


def test_an_iteration_in_the_middle_without_a_rest_before_it_guarantees_none() -> None:
    pieces = []
    for iteration, other in enumerate((4, 0, 4)):
        begin = iteration * 20
        pieces += [(iteration, "other", 0, begin, begin, begin + other)] if other else []
        pieces += [(iteration, "forward", 0, begin, begin + other, begin + 20)]
    columns = ["iteration", "phase", "place", "origin_ns", "start_ns", "end_ns"]
    table = pd.DataFrame(pieces, columns=columns)
    assert [place.phase for place in by_place(table)] == ["forward"]
    of_the_first = table[~((table["iteration"] == 0) & (table["phase"] == "other"))]
    assert [place.phase for place in by_place(of_the_first[of_the_first["iteration"] != 1])] == ["other", "forward"]


def test_where_the_line_has_no_value_yet_nothing_is_promised() -> None:
    line = FreeLine(np.array([15], np.int64), np.array([50], np.int64))
    place = Place("forward", np.array([10, 20], np.int64), np.array([20, 30], np.int64), 0.0, 10.0)
    assert list(place.windows(line, 1)) == [(0.5, 1.0, 50)]
    early = Place("forward", np.array([0, 20], np.int64), np.array([10, 30], np.int64), 0.0, 10.0)
    assert list(early.windows(line, 1)) == []
