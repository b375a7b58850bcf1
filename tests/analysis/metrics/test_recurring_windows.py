"""Recurring windows, compared with the windows of each iteration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.windows import (
    PhaseSegment,
    find_windows,
    phase_table,
    recurring_segments,
)
from ebbtide.analysis.timeseries.step_functions import FreeTimeline
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
CAPACITY = 100
DEVICE = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": CAPACITY}

# Values of a step function at the points of a grid; None: unchanged.
steps = st.lists(st.one_of(st.none(), st.integers(-50, 50)), min_size=12, max_size=12)
# ms of other, forward, backward and update
iteration = st.tuples(st.integers(0, 4), *[st.integers(1, 7)] * 3)
iterations = st.lists(iteration, min_size=1, max_size=5)
memory = st.dictionaries(
    st.integers(0, 80), st.integers(0, CAPACITY), min_size=1, max_size=40
)


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


# The first three iterations are no steady ones, whose lengths give the times.
@example([(0, 2, 1, 1)] * 3 + [(0, 1, 1, 1)] * 2, {0: 0}, 1)
@given(iterations, memory, st.integers(1, CAPACITY))
def test_guaranteed__is_free_in_every_iteration(
    lengths: Any, samples: dict[int, int], min_bytes: int
) -> None:
    trace = built(lengths, samples)
    result = find_windows(trace, min_bytes)
    ends = trace.phases(0).groupby("iteration")["end_ns"].max().to_numpy() // MS
    own = []
    for window in result.windows:
        assert window.iteration is not None
        origin = int(ends[window.iteration - 1]) if window.iteration else 0
        own.append((window.phase, origin + window.start_ms, origin + window.end_ms))
    timeline = FreeTimeline(
        np.array(sorted(samples)) * MS,
        np.array([CAPACITY - samples[t] for t in sorted(samples)]),
    )
    recurring = []
    steady = steady_iterations(trace).numbers
    for segment in recurring_segments(phase_table(trace, 0), steady):
        assert len(segment.starts) >= len(lengths) - (segment.phase == "other")
        for begins, until, free in segment.windows(timeline, min_bytes):
            assert 0 <= begins < until <= 1
            assert free >= min_bytes
            times = (segment.start_ns + segment.length_ns * x for x in (begins, until))
            recurring.append((segment.phase, free, *(t / MS for t in times)))
            for start, end in zip(segment.starts / MS, segment.ends / MS, strict=True):
                first, last = (
                    start + begins * (end - start),
                    start + until * (end - start),
                )
                around = [
                    w
                    for w in own
                    if w[0] == segment.phase
                    and w[1] <= first + 1e-6
                    and last <= w[2] + 1e-6
                ]
                assert len(around) == 1
                # This iteration has at least as much free at every moment of it.
                for t in range(math.floor(first + 1e-6), math.ceil(last - 1e-6)):
                    assert CAPACITY - samples[max(s for s in samples if s <= t)] >= free
    assert recurring == [
        (w.phase, w.free_bytes, w.start_ms, w.end_ms) for w in result.guaranteed
    ]


def test_guaranteed__idle_share_is_that_of_busiest_iteration() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0).memory(0, 0)
    for iteration, busy in enumerate((1, 4, 2)):
        begin = iteration * 30 * MS
        for index, phase in enumerate(PHASES):
            rank.phase(
                phase, begin + index * 10 * MS, begin + (index + 1) * 10 * MS, iteration
            )
        rank.transfer("h2d", begin + 20 * MS, begin + (20 + busy) * MS, 1)
    shares = {
        w.phase: w.h2d_idle_share for w in find_windows(builder.build(), 1).guaranteed
    }
    assert shares == {"forward": 1.0, "backward": 1.0, "update": 0.6}


def test_guaranteed__times_use_median_phase_lengths() -> None:
    result = find_windows(
        built([(0, 1, 6, 4), (0, 2, 7, 4), (0, 9, 20, 5)], {0: 0}), 1
    ).guaranteed
    assert [(w.phase, w.start_ms, w.end_ms) for w in result] == [
        ("forward", 0, 2),
        ("backward", 2, 9),
        ("update", 9, 13),
    ]


def test_free_timeline__last_sample_at_one_time_counts() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], first_iteration_start_ns=0).phase(
        "forward", 0, 9 * MS, 0
    )
    for t, used in ((0, 0), (3, 95), (3, 10), (6, 0), (6, 90)):
        rank.memory(t * MS, used)
    result = find_windows(builder.build(), 50)
    for windows in (result.windows, result.guaranteed):
        assert [
            (w.start_ms, pytest.approx(w.end_ms), w.free_bytes) for w in windows
        ] == [(0, 6, 90)]


def test_recurring_segments__excludes_other_that_later_iteration_lacks() -> None:
    rows = []
    for iteration, other in enumerate((4, 0, 4)):
        begin = iteration * 20
        rows += [(iteration, "other", 0, begin, begin, begin + other)] if other else []
        rows += [(iteration, "forward", 0, begin, begin + other, begin + 20)]
    columns = ["iteration", "phase", "position", "origin_ns", "start_ns", "end_ns"]
    table = pd.DataFrame(rows, columns=columns)
    assert [segment.phase for segment in recurring_segments(table)] == ["forward"]
    later_rows = table[~((table["iteration"] == 0) & (table["phase"] == "other"))]
    assert [
        segment.phase
        for segment in recurring_segments(later_rows[later_rows["iteration"] != 1])
    ] == [
        "other",
        "forward",
    ]


def test_guaranteed__excludes_time_before_first_sample() -> None:
    timeline = FreeTimeline(np.array([15], np.int64), np.array([50], np.int64))
    segment = PhaseSegment(
        "forward", np.array([10, 20], np.int64), np.array([20, 30], np.int64), 0.0, 10.0
    )
    assert list(segment.windows(timeline, 1)) == [(0.5, 1.0, 50)]
    early = PhaseSegment(
        "forward", np.array([0, 20], np.int64), np.array([10, 30], np.int64), 0.0, 10.0
    )
    assert list(early.windows(timeline, 1)) == []
