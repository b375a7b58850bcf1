"""Activity of the GPU: totals, phases, causes, kernels, collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.metrics.activity.activity import GpuActivity, queue_length
from ebbtide.analysis.tables.activity import activity_tables
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.conftest import examples

KINDS = ("compute", "communication", "copy", "memset")
GPU = {"device": "cuda:0", "kind": "cuda"}
# Iterations of 30 ns on the host; the device runs each phase 5 ns later.
LENGTH, LAG = 30, 5
HOST_PHASES = (("forward", 2, 10), ("backward", 12, 20), ("update", 21, 28))
Row = tuple[str, int, int, int | None]


def built(rows: list[Row], iterations: int = 3) -> Trace:
    """Make a trace. rows: kind, start, length, and how long before the start it was
    launched, ns."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    for number in range(iterations):
        for phase, start, end in HOST_PHASES:
            start, end = start + number * LENGTH, end + number * LENGTH
            rank.phase(phase, start, end, number, 0, start + LAG, end + LAG)
    for kind, start, length, before in rows:
        launch = None if before is None else start - before
        if kind == "h2d":
            rank.transfer("h2d", start, start + length, 8, launch_ns=launch)
        else:
            rank.kernel(start, start + length, kind, kind, launch_ns=launch)
    return builder.build()


def activity(trace: Trace) -> GpuActivity:
    return TraceAnalysis(trace).activity(0)


ROWS = st.lists(
    st.tuples(
        st.sampled_from([*KINDS, "h2d"]),
        st.integers(0, 100),
        st.integers(1, 12),
        st.none() | st.integers(0, 30),
    ),
    max_size=12,
).map(lambda rows: [("compute", 50, 1, 1), *rows])


def moments(rows: list[Row], *kinds: str) -> set[int]:
    return {
        t
        for kind, start, length, _ in rows
        if kind in kinds
        for t in range(start, start + length)
    }


def ns(ms: float | None) -> float:
    assert ms is not None
    return round(ms * 1e6, 6)


@settings(max_examples=examples(40, by_default=5))
@given(ROWS)
def test_totals_and_causes__agree_with_sets_of_moments(rows: list[Row]) -> None:
    result = activity(built(rows))
    total = result.total
    busy = moments(rows, *KINDS, "h2d")
    compute, communication = moments(rows, "compute"), moments(rows, "communication")
    copy, memset = moments(rows, "copy", "h2d"), moments(rows, "memset")
    span = max(busy) + 1 - min(busy)
    assert ns(total.span_ms) == span
    assert ns(total.compute_ms) == len(compute)
    assert ns(total.communication_ms) == len(communication)
    assert ns(total.copy_ms) == len(copy)
    assert ns(total.idle_ms) == span - len(busy)
    if communication:
        assert total.communication_overlap_share == pytest.approx(
            len(communication & compute) / len(communication)
        )
    else:
        assert total.communication_overlap_share is None
    causes = {cause: ns(ms) for cause, ms in result.without_compute.items()}
    assert causes["communication"] == len(communication - compute)
    assert causes["copy"] == len(copy - communication - compute)
    assert causes["memset"] == len(memset - copy - communication - compute)
    assert sum(causes.values()) == span - len(compute)
    # Launches are at most 30 ns early, so none is late by more than 0.1 ms.
    assert causes["host_busy"] == 0


@settings(max_examples=examples(40, by_default=5))
@given(ROWS)
def test_phases__have_the_kernels_that_they_launched(rows: list[Row]) -> None:
    result = activity(built(rows, iterations=1))
    phases = {phase.phase: phase for phase in result.phases}
    host = dict.fromkeys(range(28), "other") | {
        t: name for name, start, end in HOST_PHASES for t in range(start, end)
    }
    device = dict.fromkeys(range(33), "other")
    device |= {
        t + LAG: name for name, start, end in HOST_PHASES for t in range(start, end)
    }
    for kind in ("compute", "communication"):
        ran: dict[str, set[int]] = {part: set() for part in ITERATION_PARTS}
        for row_kind, start, length, before in rows:
            if row_kind == kind:
                for t in range(start, start + length):
                    part = device.get(t) if before is None else host.get(start - before)
                    if part is not None:
                        ran[part].add(t)
        assert {part: ns(getattr(phases[part], f"{kind}_ms")) for part in phases} == {
            p: len(r) for p, r in ran.items()
        }
    busy, copies = moments(rows, *KINDS, "h2d"), moments(rows, "copy", "h2d")
    for part, phase in phases.items():
        own = {t for t, name in device.items() if name == part}
        assert ns(phase.idle_ms) == len(own - busy)
        assert ns(phase.copy_ms) == len(own & copies)


@settings(max_examples=examples(40, by_default=5))
@given(ROWS)
def test_queue_length__counts_what_was_launched_and_has_not_begun(
    rows: list[Row],
) -> None:
    times, lengths = queue_length(built(rows), 0)
    for t in range(-30, 120):
        waiting = sum(
            before is not None and start - before <= t < start
            for _, start, _, before in rows
        )
        position = int(np.searchsorted(times, t, side="right")) - 1
        assert (int(lengths[position]) if position >= 0 else 0) == waiting


def test_kernels_and_streams__have_their_spread_and_idle_time() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for start, end, stream in (
        (0, 2_000, 7),
        (5_000, 6_000, 7),
        (10_000, 19_000, 7),
        (1_000, 3_000, None),
    ):
        rank.kernel(start, end, "compute", "gemm", stream=stream)
    result = activity(builder.build())
    (kernel,) = result.kernels
    assert (kernel.min_us, kernel.median_us, kernel.max_us) == (1.0, 2.0, 9.0)
    assert [(s.stream, s.count, s.busy_ms, s.idle_ms) for s in result.streams] == [
        (7, 3, 0.012, pytest.approx(0.007)),
        (None, 1, 0.002, pytest.approx(0.017)),
    ]


def test_causes__tell_late_launches_from_a_busy_host_and_a_queue() -> None:
    us = 1000
    rows: list[Row] = [
        ("compute", 0, 10 * us, 0),
        ("compute", 15 * us, 10 * us, 2 * us),  # idle 5 us, launched after 3 us
        ("compute", 1025 * us, 10 * us, 2 * us),  # idle 1000 us, launched after 998 us
        ("compute", 1045 * us, 10 * us, 30 * us),  # idle 10 us, launched before
        ("compute", 1075 * us, 10 * us, None),  # idle 20 us
        ("h2d", 1088 * us, 4 * us, 1 * us),  # idle 3 us, launched after 2 us
        ("h2d", 1112 * us, 1 * us, None),  # idle 20 us
        # idle 500 us, launched after 50 us: a slow start
        ("compute", 1613 * us, 1 * us, 450 * us),
        ("compute", 2214 * us, 1 * us, 200 * us),  # idle 600 us, launched after 400 us
    ]
    causes = activity(built(rows)).without_compute
    idle = {"late_launch": 0.008, "host_busy": 1.6, "queue": 0.51, "unknown": 0.04}
    assert causes == pytest.approx(
        {"communication": 0, "copy": 0.005, "memset": 0, "launch_call": 0, **idle}
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # A gap from 10 to 1000 us. The call begins before it and returns in it.
        ((5, 600), {"launch_call": 0.59, "queue": 0.4}),
        ((30, 980), {"late_launch": 0.02, "launch_call": 0.95, "queue": 0.02}),
        ((310, 2000), {"host_busy": 0.3, "launch_call": 0.69}),
        # Short calls are no cause.
        ((5, 60), {"queue": 0.99}),
        ((900, 950), {"host_busy": 0.99}),
    ],
)
def test_causes__name_a_launching_call_that_is_long(
    call: tuple[int, int], expected: dict[str, float]
) -> None:
    us, (begin, end) = 1000, call
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    rank.kernel(0, 10 * us, launch_ns=0)
    rank.kernel(1000 * us, 1010 * us, launch_ns=begin * us)
    for start, stop in ((begin, end), (begin, begin + 1)):
        rank.add(
            "calls", start_ns=start * us, end_ns=stop * us, name="cudaLaunchKernel"
        )
    causes = activity(builder.build()).without_compute
    assert {cause: ms for cause, ms in causes.items() if ms} == pytest.approx(expected)


def test_activity__counts_only_the_time_that_was_recorded() -> None:
    """Slices hold the first and the third of four iterations; work of the first runs on
    after its slice."""
    trace = built(
        [
            ("compute", 8, 6, 2),
            ("compute", 30, 8, 9),
            ("compute", 70, 5, 2),
            ("compute", 85, 2, None),
        ],
        4,
    )
    trace.raw_meta["ranks"][0] |= {
        "transfers_recorded": True,
        "transfers_spans_ns": [[0, 33], [63, 93]],
    }
    result = activity(Trace(trace.path, trace.raw_meta, trace.table))
    # From 8 to 38, and from 63 to 87.
    assert ns(result.total.span_ms) == 30 + 24
    assert ns(result.total.compute_ms) == 6 + 8 + 5 + 2
    assert ns(result.total.idle_ms) == 54 - 21
    assert sum(map(ns, result.without_compute.values())) == 54 - 21
    # The second and the fourth iteration, in which nothing was recorded, do not count.
    phases = {phase.phase: phase for phase in result.phases}
    assert ns(phases["forward"].compute_ms) == 5.5
    assert ns(phases["forward"].idle_ms) == (2 + 3) / 2


def test_launches__have_the_delays_and_the_queue_of_compute_kernels() -> None:
    us = 1000
    rows: list[Row] = [
        ("compute", 10 * us, 50 * us, 5 * us),  # launched at 5
        ("compute", 60 * us, 10 * us, 50 * us),  # at 10, when the first begins
        ("compute", 70 * us, 10 * us, 50 * us),  # at 20, one waits
        ("memset", 70 * us, 10 * us, 55 * us),
        ("compute", 80 * us, 10 * us, 50 * us),  # at 30, two wait
        ("compute", 95 * us, 10 * us, None),
    ]
    launches = activity(built(rows)).launches
    assert launches is not None
    assert (launches.count, launches.median_delay_us, launches.median_queued) == (
        4,
        50,
        0.5,
    )
    assert launches.p95_queued == pytest.approx(1.85)
    assert activity(built([("compute", 5, 1, None)])).launches is None


def test_activity__of_a_trace_without_iterations_has_totals_only() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU]).kernel(0, 10, launch_ns=0).transfer("d2h", 10, 20, 1)
    result = activity(builder.build())
    assert result.phases == []
    assert (result.total.compute_ms, result.total.copy_ms) == (1e-5, 1e-5)
    assert "no phases were recorded" in result.missing[0]


def test_activity__is_not_known_where_kernels_were_not_recorded() -> None:
    result = activity(built([("h2d", 0, 5, None)]))
    printed: dict[str, Any] = result.as_json()
    assert set(printed["total"].values()) == {None}
    assert [phase.pop("phase") for phase in printed["phases"]] == list(ITERATION_PARTS)
    assert {value for phase in printed["phases"] for value in phase.values()} == {None}
    assert "ProfilerActivity.CUDA" in result.missing[0]


def test_activity__is_that_of_the_first_device() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:1", "kind": "cuda"}, GPU])
    rank.kernel(0, 10, device="cuda:1").kernel(50, 90, device="cuda:0")
    total = activity(builder.build()).total
    assert ns(total.span_ms) == 10


def test_kernels__are_sorted_by_time_with_counts_and_shares() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    rank.kernel(0, 10, name="short").kernel(0, 60, name="long").kernel(
        20, 30, name="short"
    ).kernel(0, 99, "memset")
    first, second = activity(builder.build()).kernels
    assert (first.name, first.count, first.time_ms, first.share) == (
        "long",
        1,
        6e-5,
        0.75,
    )
    assert (second.name, second.count, second.mean_us) == ("short", 2, 0.01)


def test_operators__sum_the_kernels_that_they_launched() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    rank.kernel(0, 10, name="a", operator="mm").kernel(
        10, 40, name="b", operator="mm"
    ).kernel(50, 55, name="a")
    rank.kernel(60, 61, "communication", name="c", operator="mm")
    result = activity(builder.build()).operators
    assert [(row.name, row.kind, row.count, ns(row.time_ms)) for row in result] == [
        ("mm", "compute", 2, 40),
        (None, "compute", 1, 5),
        ("mm", "communication", 1, 1),
    ]
    (table,) = (
        table
        for table in activity_tables(activity(builder.build()))
        if table.name == "operators"
    )
    assert [row[0].text for row in table.rows] == ["mm", "-", "mm"]


def ranked(
    *lengths: list[int], name: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
) -> Trace:
    builder = TraceBuilder()
    for number, of_rank in enumerate(lengths):
        rank = builder.rank(number, devices=[GPU])
        for position, length in enumerate(of_rank):
            rank.kernel(
                100 * position,
                100 * position + length,
                "communication",
                name,
                launch_ns=100 * position,
            )
    return builder.build()


def test_collectives__the_rank_with_the_shortest_came_last() -> None:
    skew = activity(ranked([10, 40, 7], [30, 15, 7])).collectives
    assert skew is not None
    assert skew.count == 3
    assert [(wait.rank, ns(wait.wait_ms), wait.last) for wait in skew.waits] == [
        (0, 25, 2),
        (1, 20, 1),
    ]


def test_collectives__of_different_process_groups_are_compared_within_each() -> None:
    """Two pairs of ranks reduce, then all four gather; one pair reduces once more
    often."""
    builder = TraceBuilder()
    pairs = {0: (10, 5), 1: (4, 9), 2: (7,), 3: (6,)}
    everybody = (20, 30, 50, 40)
    for number, lengths in pairs.items():
        rank = builder.rank(number, devices=[GPU])
        for position, length in enumerate((*lengths, everybody[number])):
            is_last = position == len(lengths)
            name = (
                "ncclDevKernel_AllGather_RING_LL"
                if is_last
                else "ncclDevKernel_AllReduce_RING_LL"
            )
            group = (
                "0 [0, 1, 2, 3]"
                if is_last
                else f"1 [{2 * (number // 2)}, {2 * (number // 2) + 1}]"
            )
            start = 100 * position
            rank.kernel(
                start,
                start + length,
                "communication",
                name,
                launch_ns=start,
                group=group,
            )
        rank.kernel(
            900, 900 + number, "communication", "ncclDevKernel_SendRecv", launch_ns=900
        )
    skew = activity(builder.build()).collectives
    assert skew is not None
    assert skew.count == 4
    waits = [(wait.rank, ns(wait.wait_ms), wait.last) for wait in skew.waits]
    assert waits == [(0, 6 + 0, 2), (1, 4 + 10, 1), (2, 1 + 30, 0), (3, 20, 1)]


def test_collectives__are_compared_only_if_all_ranks_have_the_same() -> None:
    assert activity(ranked([10, 40], [30])).collectives is None
    assert activity(ranked([10, 40])).collectives is None
    assert activity(ranked([], [])).collectives is None
    builder = TraceBuilder()
    for number, operation in enumerate(("AllReduce", "AllGather")):
        rank = builder.rank(number, devices=[GPU])
        rank.kernel(
            0, 9, "communication", f"ncclDevKernel_{operation}_RING_LL", launch_ns=0
        )
    assert activity(builder.build()).collectives is None
