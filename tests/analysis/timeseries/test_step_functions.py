"""Step functions, cumulative amounts and unions of intervals, against brute force."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbtide.analysis.timeseries.step_functions import (
    cumulative,
    merge_times,
    peak_between,
    union_length,
)

Pair = tuple[int, int]
Amount = tuple[int, int, int]

small = st.integers(0, 30)
intervals = st.tuples(small, small).map(lambda pair: (min(pair), max(pair)))
# (start, length, amount)
amounts = st.lists(
    st.tuples(small, st.integers(0, 12), st.integers(0, 10**9)), min_size=1, max_size=12
)
offsets = st.sampled_from([0, 10**15, 1_700_000_000_000_000_000])


def ints(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def columns(pairs: list[Pair]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return ints([a for a, _ in pairs]), ints([b for _, b in pairs])


def passed(copies: list[Amount], time: int) -> Fraction:
    """Return the exact total by a time: an amount without duration passes in the
    nanosecond before its end."""
    total = Fraction(0)
    for start, length, amount in copies:
        end = start + length
        begin = min(start, end - 1)
        total += amount * Fraction(min(max(time - begin, 0), end - begin), end - begin)
    return total


def totals(copies: list[Amount], times: list[int], offset: int = 0) -> list[float]:
    starts = ints([start + offset for start, _, _ in copies])
    ends = ints([start + length + offset for start, length, _ in copies])
    sizes = np.array([amount for _, _, amount in copies], np.float64)
    return cumulative(starts, ends, sizes)(ints(times) + offset).tolist()


@given(
    st.lists(st.tuples(small, st.integers(-(10**12), 10**12)), max_size=10),
    st.lists(intervals, max_size=8),
    offsets,
)
def test_peak_between__is_largest_value_in_interval(
    samples: list[Pair], spans: list[Pair], offset: int
) -> None:
    samples.sort(key=lambda sample: sample[0])
    times, values = columns(samples)
    starts, ends = columns(spans)
    got = peak_between(times + offset, values, starts + offset, ends + offset)
    assert len(got) == len(spans)
    for peak, (start, end) in zip(got.tolist(), spans, strict=True):
        values_at = [
            [v for t, v in samples if t <= times][-1:]
            for times in range(start, end + 1)
        ]
        # Of several samples times one time inside the interval each has been the value,
        # if for no time times all.
        values_inside = [v for last in values_at for v in last] + [
            v for t, v in samples if start < t <= end
        ]
        if values_inside:
            assert peak == max(values_inside)
        else:
            assert np.isnan(peak)


def test_peak_between__is_nan_without_samples() -> None:
    assert np.isnan(peak_between(ints([]), ints([]), ints([0, 5]), ints([1, 9]))).all()


def test_peak_between__is_empty_without_intervals() -> None:
    assert len(peak_between(ints([1]), ints([2]), ints([]), ints([]))) == 0


@given(amounts, offsets)
@example([(0, 0, 10**9)], 10**15)
@example([(0, 3, 10**9), (1, 7, 10**9 - 1), (2, 0, 1)], 1_700_000_000_000_000_000)
def test_cumulative__is_exact_at_every_time(copies: list[Amount], offset: int) -> None:
    times = list(range(-3, 48))
    got = totals(copies, times, offset)
    slack = 1e-12 * max(sum(amount for _, _, amount in copies), 1)
    for time, value in zip(times, got, strict=True):
        assert value == pytest.approx(float(passed(copies, time)), rel=0, abs=slack)


def test_cumulative__resolves_nanoseconds_after_long_uptime() -> None:
    late = 10**15
    assert totals([(0, 4, 8)], [0, 1, 2, 3, 4], offset=late) == [0, 2, 4, 6, 8]
    assert totals([(0, 4, 8)], [0, 1, 2, 3, 4], offset=1_700 * late) == [0, 2, 4, 6, 8]


def test_cumulative__is_constant_in_long_pause_after_overlapping_copies() -> None:
    # The rates of copies that end are subtracted in another order than they were added.
    copies = [(0, 3, 10**9), (1, 7, 10**9 + 1), (2, 11, 10**9 + 7)]
    hour = 3600 * 10**9
    first, last = totals([*copies, (2 * hour, 5, 1)], [100, hour])
    assert last - first == pytest.approx(0, abs=1)
    assert last == pytest.approx(3 * 10**9 + 8, abs=1)


def test_cumulative__is_zero_without_amounts() -> None:
    assert cumulative(ints([]), ints([]), np.array([], np.float64))(
        ints([1, 2])
    ).tolist() == [0, 0]


@given(st.lists(intervals, max_size=12), offsets)
def test_union_length__equals_count_of_covered_nanoseconds(
    pairs: list[Pair], offset: int
) -> None:
    starts, ends = columns(pairs)
    covered = {time for start, end in pairs for time in range(start, end)}
    assert union_length(starts + offset, ends + offset) == len(covered)


@given(
    st.lists(small | offsets),
    st.lists(small | offsets),
    st.sampled_from([np.int64, np.float64]),
)
def test_merge_times__is_the_sorted_union(
    first: list[int], second: list[int], kind: type
) -> None:
    a, b = np.array(sorted(first), kind), np.array(sorted(second), kind)
    assert list(merge_times(a, b)) == list(np.union1d(a, b))
