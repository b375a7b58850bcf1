"""Traffic of copies and counters, against direct counts per tick of an integer
clock."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.link_throughput import (
    Traffic,
    both_busy,
    copied_iterations,
    copies,
    traffic,
)
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
PEAK = 10e9
DEVICE = {"device": "cuda:0", "kind": "cuda", "link": {"peak_bytes_per_s": PEAK}}
Ints = npt.NDArray[np.int64]
# (start, length, bytes)
moved = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 10**9)), max_size=8
)
pairs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted),
    min_size=1,
    max_size=6,
)
offsets = st.sampled_from([0, 1_700_000_000_000_000_000])


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def of_copies(h2d: Any = (), d2h: Any = (), offset: int = 0) -> Trace:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], transfers_recorded=True)
    for direction, rows in (("h2d", h2d), ("d2h", d2h)):
        for start, length, size in rows:
            rank.transfer(direction, start + offset, start + length + offset, size)
    return builder.build()


def of_samples(
    samples: list[tuple[int, float | None]],
    window: int = 10,
    peak: float | None = PEAK,
    device: str = "cuda:0",
) -> Trace:
    """Make a trace with h2d samples (ms, bytes/s) whose windows are `window` ms
    long."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{**DEVICE, "link": {"peak_bytes_per_s": peak}}])
    for t, rate in samples:
        rank.link(t * MS, window * MS, "gpm", device=device, h2d_bytes_per_s=rate)
    return builder.build()


def recorded(trace: Trace, direction: str = "h2d") -> Traffic:
    moved_bytes = traffic(trace, 0, direction)
    assert moved_bytes is not None
    return moved_bytes


def ticks(rows: list[tuple[int, int, int]]) -> set[int]:
    return {t for start, length, _ in rows for t in range(start, start + length)}


@given(moved, moved, pairs, offsets)
def test_traffic__of_copies_is_exact(
    h2d: Any, d2h: Any, spans: list[list[int]], offset: int
) -> None:
    trace = of_copies(h2d, d2h, offset)
    starts, ends = (ints(*column) + offset for column in zip(*spans, strict=True))
    moved_bytes, both = recorded(trace), both_busy(trace, 0)
    assert moved_bytes.busy is not None
    assert both is not None
    busy = moved_bytes.busy(starts, ends).tolist()
    at_once = both(starts, ends).tolist()
    sizes = moved_bytes.bytes(starts, ends).tolist()
    idle = moved_bytes.idle_share(starts, ends, None).tolist()
    for number, (start, end) in enumerate(spans):
        span = set(range(start, end))
        assert busy[number] == len(span & ticks(h2d))
        assert at_once[number] == len(span & ticks(h2d) & ticks(d2h))
        # Bytes pass evenly; those of a copy that takes no time pass in the nanosecond
        # before its end.
        rows = [
            (a, length, size) if length else (a - 1, 1, size) for a, length, size in h2d
        ]
        exact = sum(
            size * len(span & ticks([(a, length, 0)])) / length
            for a, length, size in rows
        )
        assert sizes[number] == pytest.approx(exact, abs=1e-3)
        assert idle[number] == pytest.approx(1 - busy[number] / max(end - start, 1))
        assert 0 <= idle[number] <= 1


@given(
    st.lists(st.floats(0, PEAK), min_size=1, max_size=12),
    st.lists(st.integers(0, 120), min_size=2, max_size=6),
)
def test_traffic_bytes__of_samples_add_up_and_shares_are_within_0_and_1(
    rates: list[float], edges: list[int]
) -> None:
    # Ten milliseconds each, from 0 on, without a gap.
    moved_bytes = recorded(
        of_samples([(10 * (n + 1), rate) for n, rate in enumerate(rates)])
    )
    edges = sorted({min(edge, 10 * len(rates)) for edge in edges})
    starts, ends = ints(*edges[:-1]) * MS, ints(*edges[1:]) * MS
    parts = moved_bytes.bytes(starts, ends)
    exact = [
        sum(rates[t // 10] * 1e-3 for t in range(a, b)) for a, b in pairwise(edges)
    ]
    assert parts.tolist() == pytest.approx(exact, abs=1)
    shares = moved_bytes.idle_share(starts, ends, PEAK)
    assert ((shares >= 0) & (shares <= 1)).all()


def test_traffic__sample_covers_time_since_previous_one() -> None:
    # Windows of 2 ms every 10 ms: the rate counts for all ten; the first sample covers
    # its window only.
    moved_bytes = recorded(of_samples([(10, 1e9), (20, 2e9), (30, 3e9)], window=2))
    assert moved_bytes.bytes(
        ints(10, 20, 10) * MS, ints(20, 30, 30) * MS
    ).tolist() == pytest.approx([20e6, 30e6, 50e6])
    assert moved_bytes.bytes(
        ints(0, 9) * MS, ints(10, 10) * MS
    ).tolist() == pytest.approx([np.nan, 1e6], nan_ok=True)


def test_traffic__gap_is_unknown_up_to_window_of_next_sample() -> None:
    samples = [(10 * n, 1e9) for n in range(1, 11)] + [
        (10 * n, 1e9) for n in range(20, 31)
    ]
    # from 0 to 100 ms and from 190 to 300 ms
    moved_bytes = recorded(of_samples(samples))
    assert moved_bytes.covered is not None
    assert (moved_bytes.covered(ints(300 * MS)) - moved_bytes.covered(ints(0)))[
        0
    ] == 210 * MS
    starts, ends = ints(100, 90, 120, 80, 185), ints(190, 110, 200, 110, 200)
    # Covered to less than half: unknown. Otherwise the uncovered part is assumed to
    # have the same rate.
    assert moved_bytes.bytes(starts * MS, ends * MS).tolist() == pytest.approx(
        [np.nan, 20e6, np.nan, 30e6, 15e6], nan_ok=True
    )
    assert np.isnan(moved_bytes.idle_share(ints(100 * MS), ints(190 * MS), PEAK)[0])


def test_traffic__late_counter_sample_covers_its_whole_window() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    for t, window in ((10, 10), (20, 10), (30, 10), (230, 200), (240, 10)):
        rank.link(t * MS, window * MS, "nvml-counters", h2d_bytes_per_s=1e9)
    assert recorded(builder.build()).bytes(ints(30 * MS), ints(230 * MS))[
        0
    ] == pytest.approx(200e6)


def test_traffic__rejects_samples_beyond_link_peak() -> None:
    rates = [1e9, 1.015 * PEAK, 1.03 * PEAK, -1.0, float("inf"), 1e9]
    moved_bytes = recorded(
        of_samples([(10 * (n + 1), rate) for n, rate in enumerate(rates)])
    )
    assert moved_bytes.rejected_samples == 3
    sizes = moved_bytes.bytes(
        ints(*range(0, 60, 10)) * MS, ints(*range(10, 70, 10)) * MS
    ).tolist()
    assert sizes == pytest.approx(
        [10e6, 101.5e6, np.nan, np.nan, np.nan, 10e6], nan_ok=True
    )
    # Slightly above the peak by rounding is all busy, and not less than idle.
    assert moved_bytes.idle_share(ints(10 * MS), ints(20 * MS), PEAK)[0] == 0.0


def test_traffic__without_peak_rejects_only_invalid_rates() -> None:
    moved_bytes = recorded(
        of_samples([(10, 1e15), (20, float("inf")), (30, 2e9)], peak=None)
    )
    assert moved_bytes.rejected_samples == 1
    assert moved_bytes.bytes(ints(20 * MS), ints(30 * MS))[0] == pytest.approx(20e6)
    assert np.isnan(moved_bytes.idle_share(ints(20 * MS), ints(30 * MS), None)[0])


def test_traffic__is_unknown_if_all_samples_are_rejected() -> None:
    moved_bytes = recorded(of_samples([(10, 2 * PEAK), (20, 3 * PEAK)]))
    assert np.isnan(moved_bytes.bytes(ints(0, 5 * MS), ints(20 * MS, 15 * MS))).all()


def test_traffic__is_none_for_direction_or_device_without_samples() -> None:
    trace = of_samples([(10, 1e9), (20, None)])
    assert traffic(trace, 0, "d2h") is None
    assert both_busy(trace, 0) is None
    assert traffic(of_samples([(10, 1e9)], device="cuda:1"), 0, "h2d") is None


def test_traffic__copies_without_size_count_as_busy_time_only() -> None:
    moved_bytes = recorded(of_copies([(0, 10, None)]))
    assert np.isnan(moved_bytes.bytes(ints(0), ints(20))[0])
    assert moved_bytes.idle_share(ints(0), ints(20), PEAK)[0] == 0.5
    some = recorded(of_copies([(0, 10, None), (10, 10, 640)]))
    assert some.bytes(ints(0), ints(20))[0] == 640
    assert some.idle_share(ints(0), ints(20), PEAK)[0] == 0.0


def test_traffic__prefers_copies_of_first_device_to_counters() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE, {**DEVICE, "device": "cuda:1"}])
    rank.transfer("h2d", 0, 10, 100).transfer("h2d", 20, 90, 999, device="cuda:1")
    rank.link(100, 100, "gpm", h2d_bytes_per_s=5e9)
    trace = builder.build()
    assert recorded(trace).bytes(ints(0), ints(100))[0] == 100
    assert recorded(trace).idle_share(ints(0), ints(100), PEAK)[0] == pytest.approx(0.9)
    assert copies(trace, 0, None).bytes.tolist() == [100]


def test_traffic__is_unknown_where_copies_were_not_recorded() -> None:
    builder = TraceBuilder()
    rank = builder.rank(
        0, devices=[DEVICE], transfers_recorded=True, first_iteration_start_ns=0
    )
    for iteration in range(3):
        rank.phase("update", 100 * iteration, 100 * iteration + 100, iteration)
        rank.transfer("h2d", 100 * iteration + 10, 100 * iteration + 40, 6)
    rank.meta["transfers_spans_ns"] = [[0, 100], [200, 300]]
    trace = builder.build()
    starts, ends = ints(0, 100, 200), ints(100, 200, 300)
    moved_bytes = recorded(trace)
    np.testing.assert_array_equal(moved_bytes.bytes(starts, ends), [6, np.nan, 6])
    np.testing.assert_allclose(
        moved_bytes.idle_share(starts, ends, PEAK), [0.7, np.nan, 0.7]
    )
    total = both_busy(trace, 0)
    assert total is not None
    np.testing.assert_array_equal(total(starts, ends), [0, np.nan, 0])
    assert copied_iterations(trace, 0) == [0, 2]
    assert "copies were recorded in 2 of 3 iterations" in " ".join(
        summarize(trace).remarks
    )
