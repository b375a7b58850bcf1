"""Changes of the level of a series: rare false alarms, and changes of known size and
place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.timeseries.change_point import MIN_VALUES, find_change
from ebbtide.analysis.timeseries.step_functions import Floats
from tests.conftest import examples, slow_case

Random = np.random.Generator


def normal(random: Random, count: int) -> Floats:
    return random.normal(0, 8, count)


def with_outliers(random: Random, count: int) -> Floats:
    return random.lognormal(0, 0.5, count) + 40 * (random.random(count) < 0.1)


def alternating(random: Random, count: int) -> Floats:
    return random.choice([-10.0, 10.0], count)


def similar_to_neighbours(random: Random, count: int) -> Floats:
    """Return values with a correlation of 0.5 between neighbours."""
    values = random.normal(0, 8, count)
    for position in range(1, count):
        values[position] = (
            0.5 * values[position - 1] + np.sqrt(1 - 0.5**2) * values[position]
        )
    return values


@pytest.mark.parametrize(
    "noise",
    [slow_case(normal), with_outliers, slow_case(alternating), similar_to_neighbours],
)
@pytest.mark.parametrize(
    "count", [slow_case(20), pytest.param(50, marks=pytest.mark.slow), 90]
)
def test_find_change__has_few_false_alarms(
    noise: Callable[[Random, int], Floats], count: int
) -> None:
    random, runs = np.random.default_rng(0), 100
    false = sum(
        find_change(100 + noise(random, count), sign, 0.01) is not None
        for _ in range(runs)
        for sign in (1, -1)
    )
    assert false <= 0.01 * runs


@pytest.mark.parametrize(("count", "noise"), [(30, 1), (60, 3), (300, 5)])
def test_find_change__finds_a_tenth_from_the_middle_on(
    count: int, noise: float
) -> None:
    random = np.random.default_rng(1)
    changes = []
    for _ in range(30):
        values = 100 + noise * random.normal(size=count)
        values[count // 2 :] *= 1.1
        changes.append(find_change(values, 1, 0.05))
        assert find_change(values, -1, 0.05) is None
    detected = [change for change in changes if change is not None]
    assert len(detected) >= 27
    assert np.median([change.position for change in detected]) == pytest.approx(
        count / 2, abs=count / 30
    )
    assert np.median([change.mean_change for change in detected]) == pytest.approx(
        5, abs=1
    )
    assert np.mean([change.is_gradual for change in detected]) < 0.2


def test_find_change__calls_a_slow_leak_gradual_from_its_beginning() -> None:
    values = 100 - 0.1 * np.arange(100) + np.random.default_rng(0).normal(0, 0.3, 100)
    change = find_change(values, -1, 0.05)
    assert change is not None
    assert change.is_gradual
    assert change.position < 20
    assert (change.before, change.after) == pytest.approx((98.4, 91.6), abs=0.5)


def test_find_change__ignores_a_change_that_ends_again_or_does_not_matter() -> None:
    values = np.random.default_rng(0).normal(100, 0.5, 90)
    values[30:60] += 20
    assert find_change(values, 1, 0.05) is None
    assert find_change(np.repeat([100.0, 104.0], 30), 1, 0.05) is None
    assert find_change(np.repeat([100.0, 106.0], 30), 1, 0.05) is not None
    assert find_change(np.repeat([100.0, 106.0], 30), 1, 0.05, scale=1000.0) is None
    assert (
        find_change(np.repeat([100.0, 200.0], (MIN_VALUES - 1) // 2), 1, 0.05) is None
    )


@settings(max_examples=examples(40, by_default=15))
@given(
    st.lists(st.integers(1, 1000), min_size=MIN_VALUES, max_size=80),
    st.integers(0, 600),
    st.sampled_from([2.0**-10, 2.0**10]),
)
def test_find_change__is_the_same_in_other_units_and_mirrored(
    values: list[int], step: int, factor: float
) -> None:
    series = np.array(values, float) + step * (
        np.arange(len(values)) > len(values) // 2
    )
    change, scaled = find_change(series, 1, 0.05), find_change(series * factor, 1, 0.05)
    assert (change is None) == (scaled is None)
    mirrored = find_change(5000 - series, -1, 0.05, scale=5000.0)
    upright = find_change(series, 1, 0.05, scale=5000.0)
    assert (mirrored is None) == (upright is None)
    if change is not None and scaled is not None:
        assert change.position == scaled.position
        assert change.after > change.before
        assert 0 <= change.position < len(values)


def heavy_tailed(random: Random, count: int) -> Floats:
    return 1 + float(random.choice([0.02, 0.2])) * random.pareto(1.2, count)


def skewed(random: Random, count: int) -> Floats:
    return random.lognormal(0, float(random.choice([0.05, 0.5, 1.0])), count)


def two_lengths(random: Random, count: int) -> Floats:
    return random.choice([1.0, 1.3], count) + 0.01 * random.normal(size=count)


def sound_series(
    random: Random, noise: Callable[[Random, int], Floats], count: int
) -> Floats:
    """Return times of steps with a slow warm-up and, in most series, with evaluation."""
    values = noise(random, count)
    warm_up = int(random.integers(0, 6))
    excess = float(random.choice([0.5, 5, 30])) * np.exp(-np.arange(warm_up))
    values[:warm_up] *= 1 + excess
    if random.random() < 0.6:
        period = int(random.choice([10, 20, 25, 50, 100, 500, 1000]))
        length = int(random.choice([1, 1, 2, 4]))
        evaluates = np.arange(count) % period >= period - length
        values[evaluates] *= float(random.choice([1.5, 3, 20]))
    return values


@pytest.mark.parametrize("noise", [heavy_tailed, skewed, two_lengths])
@pytest.mark.parametrize(
    ("count", "runs"),
    [
        (40, 200),
        pytest.param(40, 2000, marks=pytest.mark.slow),
        pytest.param(100, 1000, marks=pytest.mark.slow),
        pytest.param(1000, 400, marks=pytest.mark.slow),
        pytest.param(10_000, 200, marks=pytest.mark.slow),
    ],
)
def test_find_change__has_at_most_one_false_alarm_in_200_sound_series(
    noise: Callable[[Random, int], Floats], count: int, runs: int
) -> None:
    random = np.random.default_rng(count)
    alarms = sum(
        find_change(sound_series(random, noise, count), 1, 0.05) is not None
        for _ in range(runs)
    )
    assert alarms <= runs / 200


@pytest.mark.parametrize(
    ("first", "rest"), [(110, 10), (188, 12), (965, 35), (4800, 200)]
)
def test_find_change__finds_a_jump_at_the_end_of_a_long_series(
    first: int, rest: int
) -> None:
    values = np.random.default_rng(0).normal(1, 0.02, first + rest)
    values[first:] *= 1.5
    change = find_change(values, 1, 0.05)
    assert change is not None
    # A change of all of it begins an eighth before the end at the latest.
    assert abs(change.position - first) <= max(0.02 * first, 6)
    assert (change.before, change.after) == pytest.approx((1, 1.5), abs=0.03)
    assert find_change(values[: first + 4], 1, 0.05) is None
    # A wave that rises at the end is where it was.
    waves = np.tile(np.repeat([1.0, 1.5], 60), 5)
    assert find_change(waves, 1, 0.05) is None


@pytest.mark.parametrize("factor", [1.4, 12])
@pytest.mark.parametrize(
    ("first", "rest"), [(4, 4), (5, 5), (7, 27), (10, 50), (17, 83), (85, 15)]
)
def test_find_change__finds_a_jump_from_8_values_on(
    first: int, rest: int, factor: float
) -> None:
    random, changes = np.random.default_rng(2), []
    for _ in range(50):
        values = random.normal(1, 0.02, first + rest)
        values[first:] *= factor
        changes.append(find_change(values, 1, 0.05))
    detected = [change for change in changes if change is not None]
    assert len(detected) >= 45
    assert all(abs(change.position - first) <= 2 for change in detected)
    assert sum(change.is_gradual for change in detected) <= 5


@pytest.mark.parametrize("count", [16, 30, 60, 400])
@pytest.mark.parametrize("factor", [1.2, 3])
def test_find_change__finds_a_ramp_without_noise(count: int, factor: float) -> None:
    change = find_change(np.linspace(1, factor, count), 1, 0.05)
    assert change is not None
    assert change.is_gradual


def test_find_change__finds_a_ramp_that_begins_late() -> None:
    random = np.random.default_rng(3)
    ramp = 1 + 0.02 * np.maximum(np.arange(60) - 20, 0)
    detected = [
        find_change(ramp + random.normal(0, 0.01, 60), 1, 0.05) is not None
        for _ in range(20)
    ]
    assert sum(detected) >= 18
