"""Tests of figures of many ranks: the same whatever is kept in memory, and whether
threads compute them."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics import cache
from ebbtide.analysis.metrics.devices import pool_peaks
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.memory import memory_use
from ebbtide.analysis.metrics.ranks import scan
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.profiler.trace import Trace, TraceBuilder
from ebbtide.profiler.trace import trace as trace_module

PHASES = {"forward": (0, 300), "backward": (320, 800), "update": (800, 1000)}


def ranks(count: int) -> Trace:
    """Return ranks of six iterations whose times, memory and link differ by rank and
    iteration."""
    builder = TraceBuilder("imported")
    for rank in range(count):
        device = {
            "device": f"cuda:{rank}",
            "kind": "cuda",
            "capacity_bytes": 10_000,
            "link": {"peak_bytes_per_s": 2e9},
        }
        job = builder.rank(rank, devices=[device])
        for iteration in range(6):
            begin = 1000 * iteration + 7 * rank
            for phase, (start, end) in PHASES.items():
                job.phase(
                    phase, begin + start, begin + end - iteration * rank, iteration
                )
        for time in range(0, 6200, 20):
            for pool, size in (
                ("device", 5000 + time % 700 + 10 * rank),
                ("allocated", 4000 + time % 900 - rank),
            ):
                job.memory(time, size, pool, f"cuda:{rank}")
            rates = {
                "h2d_bytes_per_s": 1e8 * (time % 9 + rank),
                "d2h_bytes_per_s": 1e8 * (time % 7),
            }
            job.link(time, 20, "nvml-throughput", f"cuda:{rank}", **rates)
    return builder.build()


def figures(trace: Trace) -> list[str]:
    return [
        repr(part)
        for part in (
            summarize(trace),
            link_use(trace),
            memory_use(trace),
            find_windows(trace, 4000),
        )
    ]


def test_read_by_parts__figures_do_not_depend_on_what_is_kept_or_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = figures(ranks(5))
    assert len(set(expected)) == 4
    monkeypatch.setattr(scan, "_MIN_RANK_BYTES_FOR_THREADS", 0)
    monkeypatch.setattr(scan, "_MIN_BYTES", 0)
    monkeypatch.setattr(cache, "_MIN_SERIES", 1)
    monkeypatch.setattr(cache, "_SERIES_BYTES", 0)
    monkeypatch.setattr(trace_module, "_MAX_TABLE_BYTES", 1)
    assert figures(ranks(5)) == expected


@pytest.mark.parametrize("bytes_for_threads", [0, 1e6])
def test_read_by_parts__raises_the_error_of_a_rank(
    bytes_for_threads: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Trace) -> None:
        if 2 in part.ranks:
            raise ValueError("rank 2 is damaged")

    monkeypatch.setattr(scan, "_MIN_RANK_BYTES_FOR_THREADS", bytes_for_threads)
    monkeypatch.setattr(scan, "_MIN_BYTES", 0)
    with pytest.raises(ValueError, match="rank 2 is damaged"):
        scan.read_by_parts(ranks(4), fail)


def test_pool_peaks__are_those_of_the_main_device_or_the_host() -> None:
    builder = TraceBuilder("recorded")
    job = builder.rank(0, devices=[{"device": "cuda:1", "kind": "cuda"}])
    job.memory(0, 5, "device", "cuda:1").memory(1, 9, "device", "cuda:0").memory(
        2, 3, "rss", "cpu"
    )
    assert pool_peaks(builder.build(), 0) == {"device": 5, "rss": 3}
