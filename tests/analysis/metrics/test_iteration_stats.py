"""Iterations and ranks held against each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.iteration_stats import Iterations, Spread, iterations, odd
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

PHASES = ("forward", "backward", "update")
lengths = st.integers(1, 10**8)


def train(rank: RankBuilder, rows: Sequence[Sequence[int]], first: int = 0) -> None:
    """Iterations of other, forward, backward and update, ns."""
    rank.meta["first_iteration_start_ns"] = now = 0
    for iteration, (other, *phases) in enumerate(rows, first):
        now += other
        for phase, length in zip(PHASES, phases, strict=True):
            rank.phase(phase, now, now + length, iteration)
            now += length


def held(*ranks: Sequence[Sequence[int]], **meta: Any) -> Iterations:
    builder = TraceBuilder(**meta)
    for number, rows in enumerate(ranks):
        train(builder.rank(number), rows)
    return iterations(builder.build())


def of(found: Iterations, phase: str, rank: int = 0) -> Spread:
    return next(s for s in found.spreads if (s.rank, s.phase) == (rank, phase))


@given(
    st.tuples(*[lengths] * 3), st.sampled_from([0, 0, 10**6]), st.lists(st.integers(0, 10**5), min_size=5, max_size=14)
)
def test_iterations_without_noise_are_never_odd(phases: Any, other: int, shifts: list[int]) -> None:
    """Phases may share their time differently: `other` must not become odd by rounding."""
    rows = [(other, phases[0] + shift, phases[1] + 10**5 - shift, phases[2]) for shift in shifts]
    found = held(rows)
    for phase in ("iteration", "update", "other"):
        assert of(found, phase).odd == []
    assert of(found, "iteration").median_ms == pytest.approx((other + sum(phases) + 10**5) / 1e6)


@given(st.integers(10**6, 10**8), st.integers(2, 11), st.floats(0.05, 3), st.booleans())
def test_the_one_that_is_far_off_is_odd(length: int, which: int, share: float, shorter: bool) -> None:
    rows = [[0, length, length, length] for _ in range(12)]
    rows[which][2] = round(length / (1 + share) if shorter else length * (1 + share))
    found = held(rows)
    assert of(found, "backward").odd == [which]
    assert of(found, "forward").odd == []
    assert of(found, "backward").median_ms == length / 1e6
    assert of(found, "backward").spread_ms == 0
    far = of(found, "backward").min_ms if shorter else of(found, "backward").max_ms
    assert far == rows[which][2] / 1e6


def test_small_differences_are_not_odd_and_noise_has_its_own_measure() -> None:
    assert odd(pd.Series([100.0] * 9 + [101.9])) == []
    assert odd(pd.Series([100.0] * 9 + [102.1])) == [9]
    # Normal noise of 10 %: a value 3 deviations off is usual for it, one 6 off is not.
    noise = pd.Series(np.random.default_rng(0).normal(100, 10, 400))
    spread = 1.4826 * (noise - noise.median()).abs().median()
    assert spread == pytest.approx(10, rel=0.15)
    assert odd(pd.concat([noise, pd.Series([160.0], index=[400])]))[-1] == 400
    assert 400 not in odd(pd.concat([noise, pd.Series([130.0], index=[400])]))


def test_the_warm_up_is_told_apart() -> None:
    rows = [[1, 50, 2, 3], [1, 40, 2, 3]] + [[1, 10 * n, 2, 3] for n in range(1, 6)]
    found = held(rows)
    assert (found.counted, found.warmup) == (5, [0, 1])
    assert [(row["iteration"], row["warmup"]) for row in found.rows] == [(n, n < 2) for n in range(7)]
    assert of(found, "forward").median_ms == pytest.approx(30e-6)
    assert (of(found, "forward").min_ms, of(found, "forward").max_ms) == (pytest.approx(1e-5), pytest.approx(5e-5))
    assert found.rows[3]["forward_ms"] == pytest.approx(20e-6)
    assert found.rows[3]["other_ms"] == pytest.approx(1e-6)
    assert held(rows, warmup_iterations=4).warmup == [0, 1, 2, 3]


def test_the_warm_up_is_that_of_the_job_where_a_rank_began_late() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), [[0, 5, 5, 5]] * 4, first=3)
    train(builder.rank(1), [[0, 5, 5, 5]] * 7)
    found = iterations(builder.build())
    assert (found.counted, found.warmup) == (5, [0, 1])
    assert not any(row["warmup"] for row in found.rows if row["rank"] == 0)


def test_the_rank_that_is_slowest_is_counted() -> None:
    fast, slow = [[7, 10, 20, 5]] * 6, [[0, 10, 25, 5]] * 6
    assert held(fast, slow, fast).slowest_rank == {0: 0, 1: 4, 2: 0}
    # Of equal ranks none is slowest, however long they wait between the phases.
    assert held(fast, [[1, 10, 20, 5]] * 6).slowest_rank == {0: 0, 1: 0}
    assert held(fast).slowest_rank is None
    builder = TraceBuilder()
    for number, rows in enumerate((fast, slow)):
        train(builder.rank(number), rows)
    of_one = iterations(builder.build(), [0])
    assert of_one.slowest_rank == {0: 0, 1: 4}
    assert {s.rank for s in of_one.spreads} == {row["rank"] for row in of_one.rows} == {0}


@given(st.lists(st.tuples(st.integers(0, 10**7), *[lengths] * 3), min_size=5, max_size=12), st.integers(0, 10**6))
def test_ranks_with_the_same_phases_are_never_slower(rows: Any, shift: int) -> None:
    assert set((held(rows, [[other + shift, *phases] for other, *phases in rows]).slowest_rank or {}).values()) == {0}


def test_a_phase_that_never_ran_has_no_spread() -> None:
    builder = TraceBuilder()
    for iteration in range(3):
        builder.rank(0).phase("forward", 10 * iteration, 10 * iteration + 10, iteration)
    found = iterations(builder.build())
    assert {s.phase for s in found.spreads} == {"iteration", "forward", "other"}
    assert found.rows[0]["backward_ms"] is None
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_trace_without_iterations_has_none(ranks: int) -> None:
    found = held(*[[]] * ranks)
    assert (found.counted, found.warmup, found.spreads, found.rows, found.slowest_rank) == (0, [], [], [], None)
