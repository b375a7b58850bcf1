"""Traces of many equal ranks with noise, to which a test adds what sets some of them
apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.profiler.trace import Trace, TraceBuilder
from ebbtide.profiler.trace.files import new_trace, write_meta, write_rank
from ebbtide.profiler.trace.schema import TABLES

MS, GIB, PEAK = 10**6, 2**30, 32e9
LENGTHS = {"forward": 200.0, "backward": 400.0, "update": 300.0}
PERIOD_MS = 1500
_SAMPLES = 4


def fleet(
    ranks: int,
    iterations: int = 12,
    peculiar: dict[int, dict[str, float]] | None = None,
    noise: float = 0.03,
    seed: int = 0,
    ranks_per_host: int = 0,
    **meta: Any,
) -> Trace:
    """Return ranks whose iterations begin together every 1.5 s, with memory read and
    link sampled in each phase.

    Args:
        ranks: Number of ranks.
        iterations: Number of iterations; none is warm-up.
        peculiar: By rank: `forward`, `backward`, `update` (factors of their times),
            `late_ms`, `link` (factor of rates; bytes stay the same), `bytes` (more
            memory), `clock` (factor of the SM clock).
        noise: Standard deviation of times, as a share, on top of noise that all ranks
            share.
        seed: Seed of the noise.
        ranks_per_host: Ranks of a host; 0: the host is not recorded.
        meta: Keys of the entry of each rank.
    """
    random = np.random.default_rng(seed)
    builder = TraceBuilder("recorded", warmup_iterations=0)
    common = 1 + noise * random.standard_normal(iterations)
    numbers = np.arange(iterations)
    for rank in range(ranks):
        own = (peculiar or {}).get(rank, {})
        device = {
            "device": "cuda:0",
            "kind": "cuda",
            "capacity_bytes": 80 * GIB,
            "link": {"peak_bytes_per_s": PEAK},
        }
        entry = {"host": f"node{rank // ranks_per_host}"} if ranks_per_host else {}
        job = builder.rank(
            rank, devices=[device], first_iteration_start_ns=0, **entry, **meta
        )
        jitter = random.normal(0, noise * 20, iterations)
        now = (
            (numbers * PERIOD_MS + jitter + own.get("late_ms", 0.0) + 100) * MS
        ).astype(np.int64)
        for phase, length in LENGTHS.items():
            scale = (
                common
                * (1 + noise * random.standard_normal(iterations))
                * own.get(phase, 1.0)
            )
            end = now + (length * scale * MS).astype(np.int64)
            job.extend(
                "phases",
                phase=phase,
                iteration=numbers,
                micro_step=0,
                start_ns=now,
                end_ns=end,
            )
            size = (
                60 * GIB
                + int(own.get("bytes", 0))
                + random.integers(0, 64 * 2**20, iterations)
            )
            job.extend(
                "memory", t_ns=now + 1, device="cuda:0", pool="device", bytes=size
            )
            # A slow link carries the same bytes, over more samples.
            left = np.ones(iterations)
            for sample in range(1, _SAMPLES + 1):
                amount = np.minimum(left, own.get("link", 1.0))
                left = left - amount
                rates = 10e9 * amount * (1 + noise * random.standard_normal(iterations))
                columns = {
                    "device": "cuda:0",
                    "source": "gpm",
                    "window_ns": 10 * MS,
                    "h2d_bytes_per_s": rates,
                }
                job.extend(
                    "link",
                    t_ns=now + sample * 10 * MS,
                    d2h_bytes_per_s=rates,
                    **columns,
                )
            clock = 1900 * own.get("clock", 1.0) + random.integers(-15, 15, iterations)
            job.extend(
                "gpu",
                t_ns=now + 2,
                device="cuda:0",
                utilization_percent=90.0,
                sm_clock_mhz=clock,
            )
            now = end
    return builder.build()


def write_fleet(trace: Trace, path: Path) -> None:
    """Write a trace that was built in memory."""
    with new_trace(path):
        for rank in trace.ranks:
            write_rank(path, rank, {name: trace.table(rank, name) for name in TABLES})
        write_meta(path, trace.raw_meta)
