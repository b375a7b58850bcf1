"""Summaries of built traces whose figures are known in closed form."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ebbtide.analysis.metrics.missing import NO_GPU_STATE
from ebbtide.analysis.metrics.summary import (
    PhaseSummary,
    Summary,
    TransferSummary,
    summarize,
)
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

MS = 10**6
GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 1000}
# ms of other (it comes first), forward, backward, update
Times = tuple[int, int, int, int]


def train(rank: RankBuilder, iterations: Sequence[Times]) -> None:
    """Add iterations, one after the other from 0 on."""
    rank.meta["first_iteration_start_ns"] = now = 0
    for number, (other, *times) in enumerate(iterations):
        now += other * MS
        for phase, length in zip(PHASES, times, strict=True):
            rank.phase(phase, now, now + length * MS, number)
            now += length * MS


def with_iterations(
    *iterations: Times, **meta: object
) -> tuple[TraceBuilder, RankBuilder]:
    """Make a trace of one rank on a GPU, to add to."""
    builder = TraceBuilder(**meta)  # type: ignore[arg-type]
    train(builder.rank(0, devices=[GPU]), iterations)
    return builder, builder.rank(0)


def trained(*iterations: Times, **meta: object) -> Summary:
    return summarize(with_iterations(*iterations, **meta)[0].build())


def of(summary: Summary, phase: str) -> PhaseSummary:
    return next(p for p in summary.phases if p.phase == phase)


def medians(summary: Summary) -> list[float | None]:
    return [phase.median_ms for phase in summary.phases]


def test_summarize__five_iterations_leave_out_first_two() -> None:
    summary = trained(
        (9, 90, 900, 90),
        (9, 90, 900, 90),
        (1, 10, 20, 5),
        (2, 12, 26, 7),
        (3, 11, 23, 6),
    )
    assert (summary.iterations, summary.warmup_iterations) == (5, 2)
    assert medians(summary) == [11, 23, 6, 2]
    assert summary.iteration_ms == 43  # of 36, 47 and 43


def test_summarize__four_iterations_all_count_and_p95_is_interpolated() -> None:
    summary = trained((0, 90, 20, 5), (0, 10, 20, 5), (0, 20, 40, 5), (0, 30, 80, 5))
    assert (summary.iterations, summary.warmup_iterations) == (4, 0)
    assert medians(summary) == [25, 30, 5, 0]
    assert of(summary, "forward").p95_ms == pytest.approx(30 + 0.85 * 60)


@pytest.mark.parametrize(("warmup", "median"), [(0, 30), (1, 35), (4, 50), (5, None)])
def test_summarize__warm_up_of_metadata_takes_precedence(
    warmup: int, median: float | None
) -> None:
    iterations = [(0, length, 1, 1) for length in (10, 20, 30, 40, 50)]
    summary = trained(*iterations, warmup_iterations=warmup)
    assert (summary.iterations, summary.warmup_iterations) == (5, warmup)
    assert of(summary, "forward").median_ms == median
    assert (summary.iteration_ms is None) == (median is None)


@pytest.mark.parametrize("source", ["recorded", "simulated"])
def test_summarize__remarks_on_the_state_of_a_gpu_that_was_not_recorded(
    source: str,
) -> None:
    builder = TraceBuilder(source)
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase(
        "forward", 0, 1, 0
    )
    summary = summarize(builder.build())
    assert summary.gpu is None
    assert (NO_GPU_STATE in summary.remarks) == (source == "recorded")


def test_summarize__share_is_of_the_medians_that_are_shown() -> None:
    # One slow backward of three: by sums the backward would be the longer phase.
    summary = trained((0, 50, 20, 10), (0, 50, 20, 10), (0, 50, 200, 10))
    assert (summary.iteration_ms, medians(summary)) == (80, [50, 20, 10, 0])
    assert [phase.share for phase in summary.phases] == [50 / 80, 20 / 80, 10 / 80, 0]


def test_summarize__takes_slowest_rank_of_each_iteration_and_phase() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), [(0, 10, 50, 1), (0, 40, 20, 1)])
    train(builder.rank(1), [(0, 30, 20, 2), (0, 20, 30, 12)])
    summary = summarize(builder.build())
    assert summary.ranks == 2
    assert medians(summary) == [35, 40, 7, 0]
    assert summary.iteration_ms == 61.5  # of 61 on rank 0 and 62 on rank 1


def test_summarize__sums_times_and_counts_each_micro_step() -> None:
    builder = TraceBuilder()
    rank, now = builder.rank(0, first_iteration_start_ns=0), 0
    for iteration in range(3):
        for micro_step in range(2):
            for phase, length in (("forward", 3), ("backward", 4)):
                rank.phase(phase, now, now + length * MS, iteration, micro_step)
                now += length * MS
        rank.phase("update", now, now + MS, iteration, 1)
        now += MS
    # of an iteration that never finished: not counted
    rank.phase("forward", now, now + 99 * MS)
    summary = summarize(builder.build())
    assert medians(summary) == [6, 8, 1, 0]
    assert [phase.count for phase in summary.phases] == [6, 6, 3, 3]
    assert summary.iterations == 3


def test_summarize__says_where_medians_do_not_add_up() -> None:
    noisy = trained((0, 90, 10, 10), (0, 10, 90, 10), (0, 10, 10, 90))
    assert (
        noisy.iteration_ms,
        sum(phase.median_ms or 0 for phase in noisy.phases),
    ) == (110, 30)
    remark = (
        "medians of 3 noisy iterations do not add up: 30.0 ms of the phases, 110.0 ms "
        "of the iteration"
    )
    assert remark in noisy.remarks
    assert not any(
        "add up" in line
        for line in trained((0, 30, 40, 10), (0, 35, 40, 10), (0, 30, 42, 10)).remarks
    )


def test_summarize__free_memory_is_capacity_minus_reserved() -> None:
    builder, rank = with_iterations(*[(10, 10, 10, 10)] * 3)
    rank.memory(0, 300, "allocated").memory(0, 700, "reserved").memory(
        20 * MS, 800, "reserved"
    )
    summary = summarize(builder.build())
    assert [phase.peak_bytes for phase in summary.phases] == [300] * 4
    assert [phase.min_free_bytes for phase in summary.phases] == [200] * 4
    assert (summary.free_pool, summary.memory.pool, summary.memory.peak_bytes) == (
        "reserved",
        "allocated",
        300,
    )


def test_summarize__unrecorded_figures_are_null() -> None:
    summary = trained((1, 10, 20, 5), (1, 10, 20, 5))
    figures = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    for phase in figures["phases"]:
        assert phase["median_ms"] is not None
        assert [
            phase[key]
            for key in ("peak_bytes", "min_free_bytes", "h2d_bytes", "d2h_bytes")
        ] == [None] * 4
    nothing = {"count": None, "bytes": None, "busy_ms": None}
    assert figures["transfers"] == {"h2d": nothing, "d2h": nothing}
    assert figures["memory"] == {
        "capacity_bytes": 1000,
        "peak_bytes": None,
        "pool": None,
        "pools": {},
    }


def test_summarize__splits_bytes_of_copies_by_time_in_phase() -> None:
    builder, rank = with_iterations((0, 10, 10, 10), (0, 10, 10, 10))
    for begin in (0, 30 * MS):
        rank.transfer("h2d", begin + 5 * MS, begin + 15 * MS, 800).transfer(
            "d2h", begin + 22 * MS, begin + 23 * MS, 64
        )
    summary = summarize(builder.build())
    assert [phase.h2d_bytes for phase in summary.phases] == [400, 400, 0, 0]
    assert [phase.d2h_bytes for phase in summary.phases] == [0, 0, 64, 0]
    assert summary.transfers == {
        "h2d": TransferSummary(2, 1600, 20.0),
        "d2h": TransferSummary(2, 128, 2.0),
    }


POOLS = [
    ("heap allocated device", "device", "device"),
    ("allocated reserved device", "device", "device"),
    ("rss heap allocated", "allocated", "allocated"),
    ("heap requested allocated reserved", "allocated", "reserved"),
    ("tensors requested", "requested", "requested"),
    ("tensors heap", "tensors", "tensors"),
    ("rss heap", "heap", "heap"),
    ("reserved", None, "reserved"),
    ("rss", None, None),
]


def test_summarize__chooses_pools_of_peak_and_free_memory() -> None:
    for recorded, chosen, of_free in POOLS:
        builder, rank = with_iterations()
        sizes = {pool: size for size, pool in enumerate(recorded.split(), start=10)}
        for pool, size in sizes.items():
            rank.memory(0, size, pool).memory(1, size - 1, pool)
        summary = summarize(builder.build())
        assert summary.free_pool == summary.as_json()["free_pool"] == of_free
        memory = summary.memory
        assert (memory.pool, memory.peak_bytes) == (chosen, sizes.get(chosen or ""))
        assert memory.pools == sizes


def test_summarize__uses_device_times_if_every_phase_has_them() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, first_iteration_start_ns=0)
    for number, phase in enumerate(PHASES):
        rank.phase(
            phase,
            number * MS,
            (number + 1) * MS,
            0,
            0,
            number * 20 * MS,
            (number * 20 + 15) * MS,
        )
    summary = summarize(builder.build())
    assert medians(summary) == [15, 15, 15, 10]
    assert summary.iteration_ms == 55
    rank.phase("forward", 3 * MS, 4 * MS, 1)
    assert medians(summarize(builder.build())) == [1, 0.5, 0.5, 0]


def test_summarize__device_times_may_begin_slightly_before_iteration() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, first_iteration_start_ns=5 * MS)
    rank.phase("forward", 5 * MS, 6 * MS, 0, 0, 5 * MS - 300, 7 * MS)
    rank.phase("update", 6 * MS, 7 * MS, 0, 0, 7 * MS, 8 * MS)
    summary = summarize(builder.build())
    assert of(summary, "forward").median_ms == pytest.approx(2.0003)
    assert summary.iteration_ms == pytest.approx(3.0003)
    assert of(summary, "other").median_ms == 0


def test_summarize__trace_without_iterations_has_memory_and_transfers() -> None:
    builder, rank = with_iterations()
    rank.phase("forward", 0, MS).memory(5, 70).transfer("h2d", 0, MS, 9)
    summary = summarize(builder.build())
    assert (summary.iterations, summary.warmup_iterations, summary.ranks) == (0, 0, 1)
    assert medians(summary) == [None] * 4
    assert [phase.count for phase in summary.phases] == [0] * 4
    assert summary.memory.peak_bytes == 70
    assert summary.transfers["h2d"].bytes == 9


def test_summarize__trace_without_ranks_has_no_figures() -> None:
    summary = summarize(TraceBuilder().build())
    assert (summary.iterations, summary.ranks, summary.iteration_ms) == (0, 0, None)
    assert (
        summary.memory.capacity_bytes,
        summary.memory.peak_bytes,
        summary.memory.pool,
    ) == (None, None, None)
    assert medians(summary) == [None] * 4
