"""Placement of intervals on lanes: intervals on one lane nest or are disjoint."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.features.export.trace_events import any_overlap, assign_lanes

Interval = tuple[int, int, int | None]
INTERVALS = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 12), st.none() | st.integers(-2, 20)
    ).map(lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])),
    max_size=20,
)


def columns(
    intervals: list[Interval],
) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    starts, ends = (
        np.array([interval[side] for interval in intervals], np.int64)
        for side in (0, 1)
    )
    return starts, ends, [parent for _, _, parent in intervals]


def crossing(one: Interval, other: Interval) -> bool:
    """Return whether two intervals share time and neither contains the other."""
    (a, b, _), (c, d, _) = sorted([one, other], key=lambda i: (i[0], -i[1]))
    return c < b < d and a != c


@given(INTERVALS)
def test_assign_lanes__intervals_on_one_lane_nest_or_are_disjoint(
    intervals: list[Interval],
) -> None:
    starts, ends, parents = columns(intervals)
    order, lanes = assign_lanes(starts, ends, parents)
    assert sorted(order) == list(range(len(intervals)))
    assert (np.diff(starts[order]) >= 0).all()
    for first, one in enumerate(order):
        for other in order[first + 1 :]:
            together = lanes[one] == lanes[other] and starts[other] < ends[one]
            if together:
                assert not crossing(intervals[one], intervals[other])
                assert ends[other] <= ends[one]
                assert parents[other] is not None


@given(INTERVALS)
def test_assign_lanes__without_parents_needs_fewest_lanes(
    intervals: list[Interval],
) -> None:
    starts, ends, _ = columns(intervals)
    _, lanes = assign_lanes(starts, ends)
    # Halves are moments between two nanoseconds; an interval without length occupies
    # its own nanosecond only.
    moments = np.arange(0, 45, 0.5)
    open_at = [
        int(((starts < t) & (t < ends)).sum() + ((starts == t) & (ends == t)).any())
        for t in moments
    ]
    assert len(set(lanes.tolist())) == max(open_at) if intervals else not len(lanes)


@given(INTERVALS)
def test_any_overlap__is_true_if_two_intervals_share_time(
    intervals: list[Interval],
) -> None:
    starts, ends, _ = columns(intervals)
    shared = any(
        max(starts[i], starts[j]) < min(ends[i], ends[j])
        or starts[j] < starts[i] == ends[i] < ends[j]
        for i in range(len(intervals))
        for j in range(len(intervals))
        if i != j
    )
    assert any_overlap(starts, ends) == shared


def test_assign_lanes__puts_children_on_lane_of_parent() -> None:
    # An update with two parts, the second with a part of its own; another interval
    # overlaps all of them.
    starts, ends = np.array([0, 1, 5, 6, 2]), np.array([10, 5, 9, 9, 20])
    _, lanes = assign_lanes(starts, ends, [None, 0, 0, 2, None])
    assert lanes.tolist() == [0, 0, 0, 0, 1]


def test_assign_lanes__moves_overlapping_siblings_and_longer_children_to_other_lanes() -> (
    None
):
    starts, ends = np.array([0, 1, 2, 8]), np.array([10, 5, 6, 12])
    _, lanes = assign_lanes(starts, ends, [None, 0, 0, 0])
    assert lanes.tolist() == [0, 0, 1, 1]
