"""The interval of the difference of two samples: against all arrangements, and its
coverage."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from ebbtide.analysis.timeseries.two_samples import difference_interval


def interval_by_enumeration(a: list[float], b: list[float]) -> tuple[float, float]:
    """Return the narrowest pair of the sorted differences with 99 % confidence, by
    counting all arrangements."""
    places = range(len(a) + len(b))
    statistics = []
    for chosen in combinations(places, len(a)):
        others = set(places) - set(chosen)
        statistics.append(sum(other < place for place in chosen for other in others))
    pairs = sorted(y - x for x in a for y in b)
    left_out = max(
        [k for k in range(len(pairs)) if np.mean(np.array(statistics) <= k) <= 0.005],
        default=0,
    )
    return pairs[left_out], pairs[-1 - left_out]


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 6), (5, 5), (6, 6)])
def test_difference_interval__equals_enumeration(first: int, second: int) -> None:
    random = np.random.default_rng(first)
    a, b = random.lognormal(size=first).tolist(), random.lognormal(size=second).tolist()
    interval = difference_interval(pd.Series(a), pd.Series(b))
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(interval_by_enumeration(a, b))


def test_difference_interval__states_less_confidence_for_few_values() -> None:
    few = difference_interval(
        pd.Series([100.0, 200.0, 400.0]), pd.Series([110.0, 150.0, 500.0])
    )
    assert few is not None
    assert (few.low, few.high) == (110 - 400, 500 - 100)
    assert few.confidence == pytest.approx(0.9)
    assert (
        difference_interval(pd.Series([1.0, 2.0]), pd.Series([1.0, 2.0, 3.0])) is None
    )


@pytest.mark.parametrize(("first", "second"), [(4, 6), (12, 9), (40, 35)])
def test_difference_interval__holds_the_difference_as_often_as_it_says(
    first: int, second: int
) -> None:
    random = np.random.default_rng(0)
    outside = 0
    for _ in range(400):
        interval = difference_interval(
            pd.Series(random.lognormal(size=first)),
            pd.Series(7 + random.lognormal(size=second)),
        )
        assert interval is not None
        outside += not interval.low <= 7 <= interval.high
    assert outside <= 400 * (1 - interval.confidence) + 3 * 2


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_difference_interval__allows_for_iterations_that_resemble_the_ones_before(
    confidence: float,
) -> None:
    """An interval of the single values would miss the difference three times as often
    (73 % instead of 90 %)."""
    random, outside = np.random.default_rng(0), 0
    for _ in range(300):
        noise = random.standard_normal((2, 80))
        for number in range(1, 80):
            noise[:, number] = 0.5 * noise[:, number - 1] + 0.866 * noise[:, number]
        interval = difference_interval(
            pd.Series(noise[0, 20:]), pd.Series(7 + noise[1, 20:]), confidence
        )
        assert interval is not None
        outside += not interval.low <= 7 <= interval.high
    assert outside <= 300 * (1 - confidence) + 3 * 5
