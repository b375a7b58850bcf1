"""What a link moved, from copies and from counters, against what an integer clock tells tick by tick."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.analysis.metrics.link_throughput import Traffic, both_busy, copies, traffic
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
PEAK = 10e9
DEVICE = {"device": "cuda:0", "kind": "cuda", "link": {"peak_bytes_per_s": PEAK}}
Ints = npt.NDArray[np.int64]
# (start, length, bytes)
moved = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 10**9)), max_size=8)
pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), min_size=1, max_size=6)
offsets = st.sampled_from([0, 1_700_000_000_000_000_000])


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def of_copies(h2d: Any = (), d2h: Any = (), offset: int = 0) -> Trace:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE], transfers_recorded=True)
    for way, rows in (("h2d", h2d), ("d2h", d2h)):
        for start, length, size in rows:
            rank.transfer(way, start + offset, start + length + offset, size)
    return builder.build()


def of_samples(
    samples: list[tuple[int, float | None]], window: int = 10, peak: float | None = PEAK, device: str = "cuda:0"
) -> Trace:
    """(ms, h2d bytes/s) samples with windows of so many ms."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{**DEVICE, "link": {"peak_bytes_per_s": peak}}])
    for t, rate in samples:
        rank.link(t * MS, window * MS, "gpm", device=device, h2d_bytes_per_s=rate)
    return builder.build()


def known(trace: Trace, direction: str = "h2d") -> Traffic:
    found = traffic(trace, 0, direction)
    assert found is not None
    return found


def ticks(rows: list[tuple[int, int, int]]) -> set[int]:
    return {t for start, length, _ in rows for t in range(start, start + length)}


@given(moved, moved, pairs, offsets)
def test_copies_are_exact(h2d: Any, d2h: Any, asked: list[list[int]], offset: int) -> None:
    trace = of_copies(h2d, d2h, offset)
    starts, ends = (ints(*column) + offset for column in zip(*asked, strict=True))
    found, both = known(trace), both_busy(trace, 0)
    assert found.busy is not None
    assert both is not None
    busy = (found.busy(ends) - found.busy(starts)).tolist()
    at_once = (both(ends) - both(starts)).tolist()
    sizes = found.bytes(starts, ends).tolist()
    idle = found.idle_share(starts, ends, None).tolist()
    for number, (start, end) in enumerate(asked):
        span = set(range(start, end))
        assert busy[number] == len(span & ticks(h2d))
        assert at_once[number] == len(span & ticks(h2d) & ticks(d2h))
        # Bytes pass evenly; those of a copy that takes no time pass in the nanosecond before its end.
        rows = [(a, length, size) if length else (a - 1, 1, size) for a, length, size in h2d]
        exact = sum(size * len(span & ticks([(a, length, 0)])) / length for a, length, size in rows)
        assert sizes[number] == pytest.approx(exact, abs=1e-3)
        assert idle[number] == pytest.approx(1 - busy[number] / max(end - start, 1))
        assert 0 <= idle[number] <= 1


@given(moved, st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True).map(sorted))
def test_bytes_of_neighbours_add_up(h2d: Any, edges: list[int]) -> None:
    found = known(of_copies(h2d))
    parts = found.bytes(ints(*edges[:-1]), ints(*edges[1:]))
    assert parts.min() >= 0
    assert parts.sum() == pytest.approx(found.bytes(ints(edges[0]), ints(edges[-1]))[0], abs=1e-3)


@given(st.lists(st.floats(0, PEAK), min_size=1, max_size=12), st.lists(st.integers(0, 120), min_size=2, max_size=6))
def test_bytes_of_samples_add_up_and_shares_stay_shares(rates: list[float], edges: list[int]) -> None:
    # Ten milliseconds each, from 0 on, without a hole.
    found = known(of_samples([(10 * (n + 1), rate) for n, rate in enumerate(rates)]))
    edges = sorted({min(edge, 10 * len(rates)) for edge in edges})
    starts, ends = ints(*edges[:-1]) * MS, ints(*edges[1:]) * MS
    parts = found.bytes(starts, ends)
    exact = [sum(rates[t // 10] * 1e-3 for t in range(a, b)) for a, b in pairwise(edges)]
    assert parts.tolist() == pytest.approx(exact, abs=1)
    shares = found.idle_share(starts, ends, PEAK)
    assert ((shares >= 0) & (shares <= 1)).all()


def test_a_sample_stands_for_the_time_since_the_one_before() -> None:
    # Windows of 2 ms every 10 ms: the rate holds for all ten; the first one is known for its window alone.
    found = known(of_samples([(10, 1e9), (20, 2e9), (30, 3e9)], window=2))
    assert found.bytes(ints(10, 20, 10) * MS, ints(20, 30, 30) * MS).tolist() == pytest.approx([20e6, 30e6, 50e6])
    assert found.bytes(ints(0, 9) * MS, ints(10, 10) * MS).tolist() == pytest.approx([np.nan, 1e6], nan_ok=True)


def test_a_hole_is_unknown_up_to_the_window_of_the_sample_after_it() -> None:
    samples = [(10 * n, 1e9) for n in range(1, 11)] + [(10 * n, 1e9) for n in range(20, 31)]
    found = known(of_samples(samples))  # from 0 to 100 ms and from 190 to 300 ms
    assert found.covered is not None
    assert (found.covered(ints(300 * MS)) - found.covered(ints(0)))[0] == 210 * MS
    starts, ends = ints(100, 90, 120, 80, 185), ints(190, 110, 200, 110, 200)
    # Known to less than a half: unknown. Else what is not known is taken to be like the rest.
    assert found.bytes(starts * MS, ends * MS).tolist() == pytest.approx(
        [np.nan, 20e6, np.nan, 30e6, 15e6], nan_ok=True
    )
    assert np.isnan(found.idle_share(ints(100 * MS), ints(190 * MS), PEAK)[0])


def test_a_counter_that_was_read_late_knows_all_the_time_between() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE])
    for t, window in ((10, 10), (20, 10), (30, 10), (230, 200), (240, 10)):
        rank.link(t * MS, window * MS, "nvml-counters", h2d_bytes_per_s=1e9)
    assert known(builder.build()).bytes(ints(30 * MS), ints(230 * MS))[0] == pytest.approx(200e6)


def test_samples_that_no_link_has_are_left_out() -> None:
    rates = [1e9, 1.015 * PEAK, 1.03 * PEAK, -1.0, float("inf"), 1e9]
    found = known(of_samples([(10 * (n + 1), rate) for n, rate in enumerate(rates)]))
    assert found.false_samples == 3
    sizes = found.bytes(ints(*range(0, 60, 10)) * MS, ints(*range(10, 70, 10)) * MS).tolist()
    assert sizes == pytest.approx([10e6, 101.5e6, np.nan, np.nan, np.nan, 10e6], nan_ok=True)
    # Slightly above the peak by rounding is all busy, and not less than idle.
    assert found.idle_share(ints(10 * MS), ints(20 * MS), PEAK)[0] == 0.0


def test_without_a_peak_only_what_is_no_rate_is_left_out() -> None:
    found = known(of_samples([(10, 1e15), (20, float("inf")), (30, 2e9)], peak=None))
    assert found.false_samples == 1
    assert found.bytes(ints(20 * MS), ints(30 * MS))[0] == pytest.approx(20e6)
    assert np.isnan(found.idle_share(ints(20 * MS), ints(30 * MS), None)[0])


def test_all_samples_false_is_unknown_everywhere() -> None:
    found = known(of_samples([(10, 2 * PEAK), (20, 3 * PEAK)]))
    assert np.isnan(found.bytes(ints(0, 5 * MS), ints(20 * MS, 15 * MS))).all()


def test_no_time_moves_nothing() -> None:
    at = ints(5, 15, 10**6) * MS
    for found in (known(of_samples([(10, 1e9), (20, 1e9)])), known(of_copies([(0, 20 * MS, 8)])), known(of_copies())):
        assert found.bytes(at, at).tolist() == [0, 0, 0]


def test_counters_of_one_direction_tell_nothing_of_the_other() -> None:
    trace = of_samples([(10, 1e9), (20, None)])
    assert traffic(trace, 0, "d2h") is None
    assert both_busy(trace, 0) is None
    assert traffic(of_samples([(10, 1e9)], device="cuda:1"), 0, "h2d") is None


def test_copies_without_sizes_keep_the_link_busy_and_move_unknown_bytes() -> None:
    found = known(of_copies([(0, 10, None)]))
    assert np.isnan(found.bytes(ints(0), ints(20))[0])
    assert found.idle_share(ints(0), ints(20), PEAK)[0] == 0.5
    some = known(of_copies([(0, 10, None), (10, 10, 640)]))
    assert some.bytes(ints(0), ints(20))[0] == 640
    assert some.idle_share(ints(0), ints(20), PEAK)[0] == 0.0


def test_copies_recorded_but_none_made_is_idle() -> None:
    found = known(of_copies())
    assert found.bytes(ints(0), ints(20))[0] == 0
    assert found.idle_share(ints(0), ints(20), None)[0] == 1


def test_copies_count_before_counters_and_only_those_of_the_first_device() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[DEVICE, {**DEVICE, "device": "cuda:1"}])
    rank.transfer("h2d", 0, 10, 100).transfer("h2d", 20, 90, 999, device="cuda:1")
    rank.link(100, 100, "gpm", h2d_bytes_per_s=5e9)
    trace = builder.build()
    assert known(trace).bytes(ints(0), ints(100))[0] == 100
    assert known(trace).idle_share(ints(0), ints(100), PEAK)[0] == pytest.approx(0.9)
    assert copies(trace, 0, None)["bytes"].tolist() == [100]
