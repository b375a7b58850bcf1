"""Link use against figures in closed form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ebbtide.analysis.metrics.link import CopyKind, LinkUse, PhaseLink, link_use
from ebbtide.phases import PHASES
from ebbtide.profiler.trace import RankBuilder, TraceBuilder

MS = 10**6
PEAK = 10e9


def train(rank: RankBuilder, iterations: int = 6) -> None:
    """Add iterations with 10 ms a phase, from 0 on."""
    rank.meta["first_iteration_start_ns"] = 0
    for iteration in range(iterations):
        for index, phase in enumerate(PHASES):
            begin = (30 * iteration + 10 * index) * MS
            rank.phase(phase, begin, begin + 10 * MS, iteration)


def gpu(
    builder: TraceBuilder, number: int = 0, peak: float | None = PEAK
) -> RankBuilder:
    device = {
        "device": f"cuda:{number}",
        "kind": "cuda",
        "link": {"peak_bytes_per_s": peak},
    }
    rank = builder.rank(number, devices=[device])
    train(rank)
    return rank


def use_of(result: LinkUse, phase: str, direction: str, rank: int = 0) -> PhaseLink:
    (use,) = [
        u
        for u in result.phases
        if (u.rank, u.phase, u.direction) == (rank, phase, direction)
    ]
    return use


def test_link_use__copies_give_bytes_busy_time_and_rates() -> None:
    builder = TraceBuilder()
    rank = gpu(builder)
    for iteration in range(6):
        begin = 30 * iteration * MS
        # h2d: about 4 ms from 12 on, in the warm-up 8 ms. d2h: 3 ms, about 2 of them at
        # the same time.
        length = (8, 8, 3, 4, 4, 5)[iteration]
        rank.transfer(
            "h2d",
            begin + 12 * MS,
            begin + (12 + length) * MS,
            20_000_000,
            host_memory="pinned",
        )
        rank.transfer(
            "d2h", begin + 14 * MS, begin + 17 * MS, 3_000_000, host_memory="pageable"
        )
    result = link_use(builder.build())
    (entry,) = result.ranks
    assert (entry.source, entry.peak_bytes_per_s, entry.rejected_samples) == (
        "copies",
        PEAK,
        {"h2d": 0, "d2h": 0},
    )
    up = use_of(result, "backward", "h2d")
    assert (up.bytes, up.busy_ms, up.both_ms) == (pytest.approx(20e6), 4, 2)
    assert up.mean_bytes_per_s == pytest.approx(2e9)
    assert up.busy_bytes_per_s == pytest.approx(5e9)
    assert up.share_of_peak == pytest.approx(0.2)
    down = use_of(result, "backward", "d2h")
    assert (down.busy_ms, down.both_ms, down.busy_bytes_per_s) == (
        3,
        2,
        pytest.approx(1e9),
    )
    idle = use_of(result, "update", "h2d")
    assert (idle.bytes, idle.busy_ms, idle.mean_bytes_per_s, idle.busy_bytes_per_s) == (
        0,
        0,
        0,
        None,
    )
    assert result.copies == [
        CopyKind(
            0, "h2d", "pinned", 6, 120_000_000, 32.0, pytest.approx(120e6 / 32e-3)
        ),
        CopyKind(0, "d2h", "pageable", 6, 18_000_000, 18.0, pytest.approx(1e9)),
    ]


def test_link_use__counters_give_bytes_and_shares_without_busy_time() -> None:
    builder = TraceBuilder()
    rank = gpu(builder)
    for t in range(10, 181, 10):
        rates = {10: 1e9, 20: 4e9, 0: 0.0}[t % 30]
        rank.link(
            t * MS,
            10 * MS,
            "gpm",
            h2d_bytes_per_s=rates,
            d2h_bytes_per_s=20e9 if t == 10 else None,
        )
    rank.link(5 * MS, 5 * MS, "nvml-throughput", device="cuda:7", h2d_bytes_per_s=1.0)
    result = link_use(builder.build())
    (entry,) = result.ranks
    assert (entry.source, entry.rejected_samples) == ("gpm", {"h2d": 0, "d2h": 1})
    use = use_of(result, "backward", "h2d")
    assert (use.bytes, use.share_of_peak) == (pytest.approx(40e6), pytest.approx(0.4))
    assert (use.busy_ms, use.both_ms, use.busy_bytes_per_s) == (None, None, None)
    assert use_of(result, "forward", "d2h").bytes is None
    assert result.copies == []


def test_link_use__has_no_share_without_peak() -> None:
    builder = TraceBuilder()
    gpu(builder, peak=None).transfer("h2d", 0, 170 * MS, 10**9)
    use = use_of(link_use(builder.build()), "forward", "h2d")
    assert use.share_of_peak is None
    assert use.mean_bytes_per_s == pytest.approx(1e9 / 0.17)


@pytest.mark.parametrize("ranks", [0, 1])
def test_link_use__is_empty_without_records(ranks: int) -> None:
    builder = TraceBuilder()
    for number in range(ranks):
        builder.rank(number)
    result = link_use(builder.build())
    assert (len(result.ranks), result.phases, result.copies) == (ranks, [], [])


def test_link_use__copy_kinds_count_overlapping_time_once() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    for start, length, size, kind in (
        (0, 10, 100, "pinned"),
        (5, 10, None, "pinned"),
        (40, 0, 7, None),
    ):
        keys: dict[str, Any] = {"host_memory": kind} if kind else {}
        rank.transfer("h2d", start * MS, (start + length) * MS, size, **keys)
    kinds = {kind.host_memory: kind for kind in link_use(builder.build()).copies}
    assert (kinds["pinned"].count, kinds["pinned"].bytes, kinds["pinned"].busy_ms) == (
        2,
        100,
        15,
    )
    assert (kinds[None].count, kinds[None].bytes, kinds[None].busy_bytes_per_s) == (
        1,
        7,
        None,
    )
    json.dumps(link_use(builder.build()).as_json(), allow_nan=False)
