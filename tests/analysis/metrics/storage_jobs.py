"""Jobs whose optimizer state is on storage, with known requests and waits."""

from __future__ import annotations

from typing import Any

from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
MIB = 2**20
SUBGROUP = 4 * MIB


def swapped_job(
    waits_ms: int = 20, gradients: bool = False, iterations: int = 6, **swapping: Any
) -> Trace:
    """Return a job with an update of 100 ms, in which one subgroup is read in 40 ms and
    written in 10 ms.

    Args:
        waits_ms: The last part of the read that the job waits for; it waits for the
            whole write.
        gradients: Whether as many bytes as a third of the state are gradients on
            storage.
        iterations: Number of iterations.
        swapping: Keys of the section offload_optimizer.
    """
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", **swapping},
        }
    }
    info = {
        "stage": 3,
        "config": config,
        "subgroup_params": [SUBGROUP],
        "moments_lost": False,
    }
    info["largest_stored_gradient_bytes"] = 8 * MIB if gradients else None
    builder = TraceBuilder("recorded", deepspeed=info)
    rank = builder.rank(0, first_iteration_start_ns=0)
    for iteration in range(iterations):
        start = iteration * 200 * MS
        for phase, begin, end in (
            ("forward", 0, 50),
            ("backward", 50, 100),
            ("update", 100, 200),
        ):
            rank.phase(phase, start + begin * MS, start + end * MS, iteration)
        read_end = 100 + 40
        rows = [
            ("read", "storage_read", 100, read_end, 12 * SUBGROUP),
            ("prepare", "host", 100, read_end - waits_ms, None),
            ("wait", "host", read_end - waits_ms, read_end, None),
            ("update", "cpu", read_end, 190, None),
            ("write", "storage_write", 190, 200, 12 * SUBGROUP),
            ("wait", "host", 190, 200, None),
        ]
        if gradients:
            rows.append(("gradient write", "storage_write", 190, 200, 4 * SUBGROUP))
        for name, resource, begin, end, size in rows:
            times = {"start_ns": start + begin * MS, "end_ns": start + end * MS}
            rank.add(
                "ops",
                name=name,
                resource=resource,
                iteration=iteration,
                subgroup=0,
                bytes=size,
                **times,
            )
    return builder.build()
