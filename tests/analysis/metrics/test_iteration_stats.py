"""Comparison spread_of iterations and ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import median_abs_deviation

from ebbtide.analysis.metrics.iteration_stats import (
    Iterations,
    Spread,
    compare_iterations,
    outliers,
)
from ebbtide.analysis.timeseries.statistics import scaled_mad
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from tests.conftest import ebbtide_in_process

lengths = st.integers(1, 10**8)


def train(rank: RankBuilder, rows: Sequence[Sequence[int]], first: int = 0) -> None:
    """Add iterations spread_of other, forward, backward and update, ns."""
    rank.meta["first_iteration_start_ns"] = now = 0
    for iteration, (other, *phases) in enumerate(rows, first):
        now += other
        for phase, length in zip(PHASES, phases, strict=True):
            rank.phase(phase, now, now + length, iteration)
            now += length


def compared(*ranks: Sequence[Sequence[int]], **meta: Any) -> Iterations:
    builder = TraceBuilder(**meta)
    for number, rows in enumerate(ranks):
        train(builder.rank(number), rows)
    return compare_iterations(builder.build())


def spread_of(result: Iterations, phase: str, rank: int = 0) -> Spread:
    return next(s for s in result.spreads if (s.rank, s.phase) == (rank, phase))


@given(
    st.tuples(*[lengths] * 3),
    st.sampled_from([0, 0, 10**6]),
    st.lists(st.integers(0, 10**5), min_size=5, max_size=14),
)
def test_compare_iterations__has_no_outliers_without_noise(
    phases: Any, other: int, shifts: list[int]
) -> None:
    """Phases may share their time differently: rounding must not make `other` an
    outlier."""
    rows = [
        (other, phases[0] + shift, phases[1] + 10**5 - shift, phases[2])
        for shift in shifts
    ]
    result = compared(rows)
    for phase in ("iteration", "update", "other"):
        assert spread_of(result, phase).outliers == []
    assert spread_of(result, "iteration").median_ms == pytest.approx(
        (other + sum(phases) + 10**5) / 1e6
    )


@given(st.integers(10**6, 10**8), st.integers(2, 11), st.floats(0.05, 3), st.booleans())
def test_compare_iterations__distant_iteration_is_outlier(
    length: int, which: int, share: float, shorter: bool
) -> None:
    rows = [[0, length, length, length] for _ in range(12)]
    rows[which][2] = round(length / (1 + share) if shorter else length * (1 + share))
    result = compared(rows)
    assert spread_of(result, "backward").outliers == [which]
    assert spread_of(result, "forward").outliers == []
    assert spread_of(result, "backward").median_ms == length / 1e6
    assert spread_of(result, "backward").spread_ms == 0
    far = (
        spread_of(result, "backward").min_ms
        if shorter
        else spread_of(result, "backward").max_ms
    )
    assert far == rows[which][2] / 1e6


def test_outliers__ignore_small_differences_and_scale_with_noise() -> None:
    numbers = np.arange(10)
    assert outliers(numbers, np.array([100.0] * 9 + [101.9])) == []
    assert outliers(numbers, np.array([100.0] * 9 + [102.1])) == [9]
    # Normal noise spread_of 10 %: a value 3 deviations off is usual for it, one 6 off
    # is not.
    noise, numbers = np.random.default_rng(0).normal(100, 10, 400), np.arange(401)
    spread = 1.4826 * np.median(np.abs(noise - np.median(noise)))
    assert spread == pytest.approx(10, rel=0.15)
    assert outliers(numbers, np.append(noise, 160.0))[-1] == 400
    assert 400 not in outliers(numbers, np.append(noise, 130.0))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_scaled_mad__equals_scipy(values: list[float]) -> None:
    assert scaled_mad(np.array(values)) == pytest.approx(
        median_abs_deviation(values, scale="normal"), abs=1e-9
    )


def test_compare_iterations__separates_warm_up() -> None:
    rows = [[1, 50, 2, 3], [1, 40, 2, 3]] + [[1, 10 * n, 2, 3] for n in range(1, 6)]
    result = compared(rows)
    assert (result.counted, result.warmup) == (5, [0, 1])
    assert [(row["iteration"], row["warmup"]) for row in result.rows] == [
        (n, n < 2) for n in range(7)
    ]
    assert spread_of(result, "forward").median_ms == pytest.approx(30e-6)
    assert (
        spread_of(result, "forward").min_ms,
        spread_of(result, "forward").max_ms,
    ) == (
        pytest.approx(1e-5),
        pytest.approx(5e-5),
    )
    assert result.rows[3]["forward_ms"] == pytest.approx(20e-6)
    assert result.rows[3]["other_ms"] == pytest.approx(1e-6)
    assert compared(rows, warmup_iterations=4).warmup == [0, 1, 2, 3]


def test_compare_iterations__warm_up_is_that_of_job_if_rank_began_late() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), [[0, 5, 5, 5]] * 4, first=3)
    train(builder.rank(1), [[0, 5, 5, 5]] * 7)
    result = compare_iterations(builder.build())
    assert (result.counted, result.warmup) == (5, [0, 1])
    assert not any(row["warmup"] for row in result.rows if row["rank"] == 0)


def test_compare_iterations__counts_slowest_rank() -> None:
    fast, slow = [[7, 10, 20, 5]] * 6, [[0, 10, 25, 5]] * 6
    assert compared(fast, slow, fast).slowest_rank == {0: 0, 1: 4, 2: 0}
    # Of equal ranks none is slowest, however long they wait between the phases.
    assert compared(fast, [[1, 10, 20, 5]] * 6).slowest_rank == {0: 0, 1: 0}
    assert compared(fast).slowest_rank is None
    builder = TraceBuilder()
    for number, rows in enumerate((fast, slow)):
        train(builder.rank(number), rows)
    of_one = compare_iterations(builder.build(), [0])
    assert of_one.slowest_rank == {0: 0, 1: 4}
    assert (
        {s.rank for s in of_one.spreads} == {row["rank"] for row in of_one.rows} == {0}
    )


@given(
    st.lists(st.tuples(st.integers(0, 10**7), *[lengths] * 3), min_size=5, max_size=12),
    st.integers(0, 10**6),
)
def test_compare_iterations__equal_ranks_are_never_slowest(
    rows: Any, shift: int
) -> None:
    assert set(
        (
            compared(
                rows, [[other + shift, *phases] for other, *phases in rows]
            ).slowest_rank
            or {}
        ).values()
    ) == {0}


def test_compare_iterations__phase_that_never_ran_has_no_spread() -> None:
    builder = TraceBuilder()
    for iteration in range(3):
        builder.rank(0).phase("forward", 10 * iteration, 10 * iteration + 10, iteration)
    result = compare_iterations(builder.build())
    assert {s.phase for s in result.spreads} == {"iteration", "forward", "other"}
    assert result.rows[0]["backward_ms"] is None
    json.dumps(result.as_json(), allow_nan=False)


def test_iterations_command__says_if_rank_has_no_iterations(tmp_path: Path) -> None:
    builder = TraceBuilder()
    train(builder.rank(0), [[1, 5, 5, 5]] * 3)
    builder.rank(1)
    builder.write(tmp_path / "t.ebb")
    shown = ebbtide_in_process(
        "summary", "--by", "iteration", tmp_path / "t.ebb", "--rank", "1"
    ).stdout
    assert "no finished iteration of this rank was recorded" in shown
    assert (
        "no finished"
        not in ebbtide_in_process(
            "summary", "--by", "iteration", tmp_path / "t.ebb", "--rank", "0"
        ).stdout
    )
