"""Builds traces for the tests of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbtide.profiler.trace import RankBuilder, Trace, TraceBuilder

MS = 10**6
GIB = 2**30
LINK = {"generation": 4, "width": 16, "peak_bytes_per_s": 3.2e10}
GPU = {
    "device": "cuda:0",
    "kind": "cuda",
    "name": "a GPU",
    "capacity_bytes": 40 * GIB,
    "link": LINK,
}
# Between an update and the next forward 2 ms are without a phase.
ITERATION = 19 * MS
# Text of a trace must never become code of the page.
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=alert(2)>\"quoted\" 'single' & {{7*7}}\u2028"
)


def train(rank: RankBuilder, iterations: int = 6, on_gpu: bool = False) -> RankBuilder:
    """Add iterations of 4 ms forward with 10 GiB, 10 ms backward with 30 GiB, 3 ms
    update with 8 GiB, 2 ms other."""
    for number in range(iterations):
        begin = number * ITERATION
        for phase, start, end, size in (
            ("forward", 0, 4, 10),
            ("backward", 4, 14, 30),
            ("update", 14, 17, 8),
        ):
            times = begin + start * MS, begin + end * MS
            later = (times[0] + MS, times[1] + MS) if on_gpu else (None, None)
            rank.phase(phase, *times, number, 0, *later).memory(times[0], size * GIB)
    return rank


def trained(
    iterations: int = 6, ranks: int = 1, source: str = "recorded", **meta: Any
) -> TraceBuilder:
    """Build ranks that train, with a pool `allocated` of GiBs by rank."""
    builder = TraceBuilder(source)
    for number in range(ranks):
        device = {**GPU, "device": f"cuda:{number}"}
        rank = builder.rank(number, **{"devices": [device], **meta})
        train(rank, iterations)
        for table in rank.frame("memory")["t_ns"]:
            rank.memory(int(table), (number + 1) * GIB, "allocated", f"cuda:{number}")
    return builder


def with_copies(builder: TraceBuilder, copies: int = 12) -> TraceBuilder:
    """Add h2d and d2h copies of 2 ms at 25 GB/s, pinned and pageable by turns."""
    for number in range(copies):
        start = 7 * number * MS
        kind = ("pinned", "pageable")[number % 2]
        for direction in ("h2d", "d2h"):
            builder.rank(0).transfer(
                direction, start, start + 2 * MS, 5 * 10**7, host_memory=kind
            )
    return builder


def hostile() -> Trace:
    """Build a trace with hostile text in all its metadata and names."""
    builder = TraceBuilder(
        "recorded",
        command=["python", HOSTILE],
        ebbtide=HOSTILE,
        host={"name": HOSTILE},
        imported=[{"file": HOSTILE, "format": HOSTILE}],
        deepspeed={"version": HOSTILE},
    )
    builder.note(HOSTILE)
    rank_meta = {
        "devices": [{**GPU, "name": HOSTILE}],
        "model": {"classes": [HOSTILE], "params": 5, "dtypes": {HOSTILE: 5}},
        "optimizers": [
            {
                "class": HOSTILE,
                "params": 3,
                "state_bytes": 7,
                "state_devices": [HOSTILE],
            }
        ],
        "torch": HOSTILE,
    }
    rank = train(builder.rank(0, **rank_meta)).memory(5, GIB, pool=HOSTILE)
    rank.transfer("h2d", 0, MS, 5, host_memory=HOSTILE, name=HOSTILE)
    return builder.build(f"{HOSTILE.replace('/', '')}.ebb")


def long(iterations: int = 3000) -> Trace:
    """Build 100,000 samples of each of seven pools, 200,000 copies, accumulation, and
    many windows."""
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU], transfers_recorded=True)
    random = np.random.default_rng(0)
    length = 200 * MS
    end = iterations * length
    times = np.linspace(0, end, 100_000).astype(np.int64)
    for pool in (
        "device",
        "reserved",
        "allocated",
        "requested",
        "host",
        "rss",
        "pinned",
    ):
        device = "cpu" if pool in ("host", "rss", "pinned") else "cuda:0"
        sizes = random.integers(0, 40 * GIB, len(times))
        rank.extend("memory", t_ns=times, device=device, pool=pool, bytes=sizes)
    starts = np.sort(random.integers(0, end, 200_000))
    for offset, direction in enumerate(("h2d", "d2h")):
        begins = starts[offset::2]
        columns = {
            "device": "cuda:0",
            "direction": direction,
            "bytes": 10**7,
            "host_memory": "pinned",
            "name": "copy",
        }
        rank.extend("transfers", start_ns=begins, end_ns=begins + MS, **columns)
    origin, number = np.arange(iterations) * length, np.arange(iterations)
    for step in range(3):
        for phase, offset, duration in (
            ("forward", 0, 10),
            ("backward", 20, 20),
            ("update", 45, 5),
        ):
            begins = origin + (60 * step + offset) * MS
            ends = begins + duration * MS
            gpu = {"gpu_start_ns": begins + MS, "gpu_end_ns": ends + MS}
            if phase != "update" or step == 2:
                rank.extend(
                    "phases",
                    phase=phase,
                    iteration=number,
                    micro_step=step,
                    start_ns=begins,
                    end_ns=ends,
                    **gpu,
                )
    return builder.build("long.ebb")


def with_kernels(
    builder: TraceBuilder, kernels: int = 40, length: int = 2 * MS
) -> TraceBuilder:
    """Add kernels to rank 0 that fill half of the time, every fourth of them a
    collective, and their launches."""
    starts = np.arange(kernels) * 2 * length
    kinds = np.where(np.arange(kernels) % 4 == 3, "communication", "compute")
    names = np.char.add(kinds, np.char.mod(" <kernel %d>", np.arange(kernels) % 50))
    columns = {
        "device": "cuda:0",
        "stream": 7,
        "kind": kinds,
        "name": names,
        "launch_ns": starts - length // 2,
    }
    builder.rank(0).extend(
        "kernels", start_ns=starts, end_ns=starts + length, **columns
    )
    return builder


def with_categories(builder: TraceBuilder) -> TraceBuilder:
    """Add memory by category to rank 0: 4 GiB of parameters, and activations that grow
    from 2 to 5 GiB at 20 ms."""
    rank = (
        builder.rank(0)
        .memory(0, 6 * GIB, "tensors")
        .memory(20 * MS, 9 * GIB, "tensors")
    )
    for start_ns, category, size in (
        (0, "parameter", 4 * GIB),
        (0, "activation", 2 * GIB),
        (20 * MS, "activation", 3 * GIB),
    ):
        rank.add(
            "allocations",
            start_ns=start_ns,
            device="cuda:0",
            bytes=size,
            category=category,
        )
    rank.memory(100 * MS, 9 * GIB, "tensors")
    return builder
