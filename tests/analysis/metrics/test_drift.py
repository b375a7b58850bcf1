"""Drift of runs whose changes are known, and healthy runs that look as if they
drifted."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.analysis.findings import Finding
from ebbtide.analysis.findings.rules.iterations import drift
from ebbtide.analysis.metrics.drift import Drift, compared_quantities, find_drifts
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.profiler.trace import RankBuilder, TraceBuilder
from tests.analysis.findings.jobs import GIB, MIB, MS

COUNT = 60
GPU = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 80 * GIB}


def steady(
    count: int = COUNT, slow_from: int | None = None, noise: float = 0.01
) -> tuple[TraceBuilder, RankBuilder]:
    """Make a run of iterations of 100 ms with some noise, 10 % longer from one
    iteration on."""
    builder = TraceBuilder("recorded")
    rank = builder.rank(0, devices=[GPU], first_iteration_start_ns=0)
    random, now = np.random.default_rng(0), 0
    for number in range(count):
        length = 100 * MS * (1 + noise * random.normal())
        length = round(
            length * (1.1 if slow_from is not None and number >= slow_from else 1)
        )
        rank.phase("forward", now, now + length // 3, number)
        rank.phase("backward", now + length // 3, now + length // 2, number)
        rank.phase("update", now + length // 2, now + length, number)
        now += length
    return builder, rank


def ends(rank: RankBuilder) -> list[int]:
    """Return the end of each phase, in order."""
    return [int(row["end_ns"]) for row in rank.parts() if "phase" in row]


def of(builder: TraceBuilder) -> dict[str, Drift]:
    return {change.quantity: change for change in find_drifts(builder.build())}


def test_find_drifts__finds_iterations_that_become_slower() -> None:
    builder, _ = steady(slow_from=32)
    (slower,) = find_drifts(builder.build())
    assert (slower.quantity, slower.first, slower.is_gradual, slower.rank) == (
        "iteration_time",
        32,
        False,
        None,
    )
    assert slower.after / slower.before == pytest.approx(1.1, abs=0.01)
    finding = drift(JobMetrics(builder.build()))
    assert isinstance(finding, Finding)
    # 10 ms in 28 of 58 steady iterations.
    assert finding.potential_gain_ms == pytest.approx(10 * 28 / 58, abs=0.5)
    assert finding.evidence[0].endswith("since iteration 32")


def test_find_drifts__is_empty_for_steady_and_for_short_runs() -> None:
    assert of(steady()[0]) == {}
    short, _ = steady(count=9, slow_from=5)
    assert of(short) == {}
    assert compared_quantities(short.build()) == []
    results = JobMetrics(short.build())
    assert drift(results) is None


def link_job(generations: list[int], idle_generation: int) -> TraceBuilder:
    """Make a run with a sample of a busy link and one of an idle link in each
    iteration."""
    builder, rank = steady()
    for number, (backward, update) in enumerate(
        zip(ends(rank)[1::3], ends(rank)[2::3], strict=True)
    ):
        rates = {"h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 0.5e9}
        rank.link(
            backward, 20 * MS, "gpm", generation=generations[number], width=16, **rates
        )
        idle = {"h2d_bytes_per_s": 1e5, "d2h_bytes_per_s": 0.0}
        rank.link(update, 20 * MS, "gpm", generation=idle_generation, width=16, **idle)
    return builder


def test_find_drifts__finds_a_link_that_falls_to_generation_1_under_load() -> None:
    dropped = of(link_job([4] * 20 + [1] * 40, idle_generation=1))["link_speed"]
    assert (dropped.first, dropped.counts_iterations, dropped.rank) == (20, True, 0)
    assert (dropped.before, dropped.after) == pytest.approx((31.5e9, 4e9), rel=0.01)


def test_find_drifts__ignores_links_that_are_slow_while_idle() -> None:
    assert of(link_job([4] * 60, idle_generation=1)) == {}
    # The link was idle in the last 40 iterations: nothing tells how fast it would have
    # been.
    builder, rank = steady()
    for number, end in enumerate(ends(rank)[2::3]):
        busy = number < 20
        rank.link(
            end,
            MS,
            "gpm",
            generation=4 if busy else 1,
            width=16,
            h2d_bytes_per_s=2e9 if busy else 0.0,
        )
    assert of(builder) == {}


def test_find_drifts__compares_the_link_of_a_trace_without_iterations() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for number in range(50):
        generation = 4 if number < 25 else 3
        rank.link(
            number * MS,
            MS,
            "nvml-throughput",
            generation=generation,
            width=16,
            h2d_bytes_per_s=3e9,
        )
        rank.memory(number * MS, number * GIB)  # a job that starts
    dropped = of(builder)
    assert list(dropped) == ["link_speed"]
    assert not dropped["link_speed"].counts_iterations
    assert dropped["link_speed"].first == pytest.approx(26)


def test_find_drifts__finds_a_leak_of_tensors() -> None:
    builder, rank = steady()
    for number, end in enumerate(ends(rank)):
        leaked = number // 3 * 40 * MIB
        rank.memory(end, 60 * GIB + leaked).memory(end, 40 * GIB + leaked, "allocated")
    leak = of(builder)["free_memory"]
    assert leak.is_gradual
    assert leak.first <= 10
    assert leak.before - leak.after == pytest.approx(40 * MIB * 38, rel=0.1)
    finding = drift(JobMetrics(builder.build()))
    assert isinstance(finding, Finding)
    assert finding.title == "Free memory shrinks during the run"
    assert finding.potential_gain_ms is None


@pytest.mark.parametrize("with_tensors", [True, False])
def test_find_drifts__ignores_reserved_memory_that_batches_of_several_sizes_raise(
    with_tensors: bool,
) -> None:
    alarms = 0
    for seed in range(6):
        builder, rank = steady()
        sizes = 30 * GIB + (
            np.random.default_rng(seed).gamma(2, 2, COUNT) * GIB
        ).astype(np.int64)
        reserved = np.maximum.accumulate(sizes) + GIB
        for number, end in enumerate(ends(rank)):
            rank.memory(end, int(reserved[number // 3]), "reserved")
            if with_tensors:
                rank.memory(end, int(sizes[number // 3]), "allocated")
        alarms += bool(of(builder))
    # Without the counts of tensors, a batch that is the largest near the end looks like
    # a leak.
    assert alarms <= (0 if with_tensors else 1)


def test_find_drifts__compares_clocks_of_the_busy_gpu() -> None:
    builder, rank = steady()
    for number, (backward, update) in enumerate(
        zip(ends(rank)[1::3], ends(rank)[2::3], strict=True)
    ):
        rank.gpu(
            backward - 1,
            sm_clock_mhz=1980.0 if number < 41 else 1500.0,
            utilization_percent=98.0,
        )
        rank.gpu(
            update - 1,
            sm_clock_mhz=1980.0 if number < 10 else 300.0,
            utilization_percent=5.0,
        )
    clock = of(builder)["sm_clock"]
    assert (clock.before, clock.after, clock.first) == (1980, 1500, 41)


def test_find_drifts__compares_copies_of_one_kind() -> None:
    builder, rank = steady()
    for number, end in enumerate(ends(rank)[1::3]):
        # Small and pageable copies become more frequent, which says nothing of the
        # link.
        rank.transfer(
            "h2d",
            end - 10 * MS,
            end - (10 if number < 30 else 8) * MS + 4 * MS,
            64 * MIB,
            host_memory="pinned",
        )
        if number > 20:
            rank.transfer("h2d", end - MS, end, 1000, host_memory="pageable")
            rank.transfer("d2h", end - MS, end, 2 * MIB, host_memory="pageable")
    slower = of(builder)["copy_rate"]
    assert slower.first == 30
    assert slower.after / slower.before == pytest.approx(4 / 6)


HOST_POOLS = ("rss", "pinned", "cgroup")


@pytest.mark.parametrize("pool", HOST_POOLS)
@pytest.mark.parametrize("count", [40, 120])
def test_find_drifts__finds_host_memory_that_grows_on_a_gpu_job(
    pool: str, count: int
) -> None:
    builder, rank = steady(count)
    for number, end in enumerate(ends(rank)):
        rank.memory(end, 3 * GIB + number // 3 * 16 * MIB, pool, "cpu")
    growth = of(builder)[pool]
    assert growth.is_gradual
    assert growth.rank == 0
    assert growth.after - growth.before == pytest.approx(
        16 * MIB * count * 2 / 3, rel=0.1
    )
    finding = drift(JobMetrics(builder.build()))
    assert isinstance(finding, Finding)
    assert "emory" in finding.title
    assert "grows during the run" in finding.title


@pytest.mark.parametrize("pool", HOST_POOLS)
def test_find_drifts__ignores_host_memory_that_does_not_keep_growing(pool: str) -> None:
    random = np.random.default_rng(0)
    jump = np.where(np.arange(COUNT) < COUNT / 2, 3.0, 9.0)
    cache = 3 + np.log1p(np.arange(COUNT))
    full = 3 + 4 * (1 - np.exp(-np.arange(COUNT) / 10))
    saw = 3 + np.arange(COUNT) % 10 * 0.5
    little = 3 + np.arange(COUNT) * 0.0005
    for sizes in (jump, cache, full, saw, little, np.full(COUNT, 3.0)):
        builder, rank = steady()
        noisy = sizes * (1 + 0.001 * random.normal(size=COUNT))
        for number, end in enumerate(ends(rank)):
            rank.memory(end, int(noisy[number // 3] * GIB), pool, "cpu")
        assert not of(builder)


def test_find_drifts__does_not_repeat_growth_of_the_process_for_its_group() -> None:
    builder, rank = steady()
    for number, end in enumerate(ends(rank)):
        size = 3 * GIB + number // 3 * 16 * MIB
        rank.memory(end, size, "rss", "cpu").memory(end, 2 * size, "cgroup", "cpu")
    assert list(of(builder)) == ["rss"]
