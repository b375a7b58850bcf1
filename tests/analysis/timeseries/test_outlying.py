"""Values that stand out are found; of noise alone, however it is shaped, nothing is."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.analysis.timeseries.statistics import median_errors, stands_out
from ebbtide.analysis.timeseries.step_functions import Floats
from tests.conftest import slow_case


def noise(kind: str, shape: tuple[int, int], random: np.random.Generator) -> Floats:
    """Return noise of ranks (rows) over iterations, from which the median rank of each
    iteration is subtracted."""
    values = (
        random.standard_t(3, size=shape)
        if kind == "heavy tails"
        else random.normal(size=shape)
    )
    if kind == "correlated":
        for column in range(1, shape[1]):
            values[:, column] = (
                0.3 * values[:, column - 1] + np.sqrt(0.91) * values[:, column]
            )
    centered: Floats = values - np.median(values, axis=0)
    return centered


@pytest.mark.parametrize("kind", [slow_case("normal"), "heavy tails", "correlated"])
@pytest.mark.parametrize(
    ("ranks", "iterations", "jobs"),
    [(2, 10, 200), slow_case(4, 10, 200), slow_case(8, 10, 100), (64, 30, 20)],
)
def test_stands_out__is_false_for_noise(
    kind: str, ranks: int, iterations: int, jobs: int
) -> None:
    random = np.random.default_rng(ranks)
    alarms = 0
    for _ in range(jobs):
        rows = noise(kind, (ranks, iterations), random)
        alarms += bool(
            stands_out(np.median(rows, axis=1), median_errors(rows), 0.0).any()
        )
    # Even without a smallest difference: one job in a hundred at most.
    assert alarms <= max(0.01 * jobs, 1)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_stands_out__finds_a_value_beyond_noise(ranks: int) -> None:
    random = np.random.default_rng(0)
    rows = noise("normal", (ranks, 40), random)
    rows[1] += 8.0
    medians, errors = np.median(rows, axis=1), median_errors(rows)
    assert np.flatnonzero(stands_out(medians, errors, 1.0)).tolist() == [1]
    assert not stands_out(medians, errors, 12.0).any()
    assert not stands_out(-medians, errors, 1.0)[1]


def test_stands_out__values_that_scatter_hide_a_small_difference() -> None:
    # Ranks differ by 3 without noise: 6 more is nothing unusual.
    values = np.array([0.0, 3.0, -3.0, 3.0, -3.0, 6.0])
    assert not stands_out(values, np.zeros(6), 1.0).any()
    assert stands_out(np.array([0.0, 0.0, 0.0, 6.0]), np.zeros(4), 1.0).tolist() == [
        False,
        False,
        False,
        True,
    ]


def test_stands_out__leaves_missing_values_out() -> None:
    values = np.array([np.nan, 0.0, 0.0, 9.0])
    assert stands_out(values, np.array([np.nan, 0.1, 0.1, 0.1]), 1.0).tolist() == [
        False,
        False,
        False,
        True,
    ]
    assert not stands_out(np.array([np.nan, 5.0]), np.array([np.nan, 0.1]), 1.0).any()


def test_median_errors__are_those_of_normal_noise() -> None:
    rows = np.random.default_rng(0).normal(size=(40, 400))
    # The standard error of the median of normal values is sqrt(pi / 2 n).
    assert np.median(median_errors(rows)) == pytest.approx(
        np.sqrt(np.pi / 800), rel=0.1
    )
    assert np.isnan(median_errors(np.array([[1.0, np.nan]]))).all()
