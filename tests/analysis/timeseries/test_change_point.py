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
    "count", [slow_case(MIN_VALUES), pytest.param(50, marks=pytest.mark.slow), 90]
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
