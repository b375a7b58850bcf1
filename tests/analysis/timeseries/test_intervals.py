"""Unions of intervals, against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.timeseries.step_functions import (
    Union,
    difference,
    intersection,
    length,
    merged,
    overlap_ns,
    union,
    union_length_by_group,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=8,
)
Spans = list[tuple[int, int]]


def united(spans: Spans) -> Union:
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    return union(starts, ends)


def moments(spans: Spans) -> set[int]:
    return {t for start, end in spans for t in range(start, end)}


def covered(intervals: Union) -> set[int]:
    starts, ends = intervals
    assert (starts[1:] >= ends[:-1]).all()
    return moments(list(zip(starts.tolist(), ends.tolist(), strict=True)))


@given(SPANS, SPANS)
def test_unions__agree_with_sets_of_moments(first: Spans, second: Spans) -> None:
    a, b = united(first), united(second)
    assert covered(merged(a, b)) == moments(first) | moments(second)
    assert covered(intersection(a, b)) == moments(first) & moments(second)
    assert covered(difference(a, b)) == moments(first) - moments(second)
    assert length(intersection(a, b)) == length(intersection(b, a))
    assert length(a) == length(intersection(a, b)) + length(difference(a, b))


@given(SPANS, SPANS)
def test_overlap_ns__counts_the_moments_of_each_interval(
    queries: Spans, spans: Spans
) -> None:
    starts, ends = np.array(queries, np.int64).reshape(-1, 2).T
    expected = [len(moments([query]) & moments(spans)) for query in queries]
    assert overlap_ns(starts, ends, united(spans)).tolist() == expected


def test_union_length_by_group__does_not_overflow_for_days_in_many_groups() -> None:
    groups, day_ns = np.arange(200_000), 86_400 * 10**9
    lengths = union_length_by_group(
        groups, np.zeros_like(groups), groups + day_ns, len(groups)
    )
    assert (lengths == groups + day_ns).all()


@given(st.lists(st.tuples(st.integers(0, 3), SPANS), max_size=5))
def test_union_length_by_group__keeps_groups_apart(
    groups: list[tuple[int, Spans]],
) -> None:
    rows = [(group, *interval) for group, spans in groups for interval in spans]
    number, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
    expected = [
        len({t for group, spans in groups if group == n for t in moments(spans)})
        for n in range(4)
    ]
    assert union_length_by_group(number, starts, ends, 4).tolist() == expected
