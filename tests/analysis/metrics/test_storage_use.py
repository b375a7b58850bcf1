"""Storage use of jobs with known requests and waits."""

from __future__ import annotations

from typing import Any

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.storage_use import storage_use
from ebbtide.analysis.timeline.boxes import substep_lanes
from ebbtide.interleave.replay.workload_from_trace import swap_buffer_bytes
from ebbtide.profiler.trace import Trace, TraceBuilder

MS = 10**6
MIB = 2**20
SUBGROUP = 4 * MIB


def swapped_job(waits_ms: int = 20, gradients: bool = False, iterations: int = 6, **swapping: Any) -> Trace:
    """Return a job with an update of 100 ms, in which one subgroup is read in 40 ms and written in 10 ms.

    Args:
        waits_ms: The last part of the read that the job waits for; it waits for the whole write.
        gradients: Whether as many bytes as a third of the state are gradients on storage.
        iterations: Number of iterations.
        swapping: Keys of the section offload_optimizer.
    """
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", **swapping}}}
    info = {"stage": 3, "config": config, "subgroup_params": [SUBGROUP], "moments_lost": False}
    info["largest_stored_gradient_bytes"] = 8 * MIB if gradients else None
    builder = TraceBuilder("recorded", deepspeed=info)
    rank = builder.rank(0, first_iteration_start_ns=0)
    for iteration in range(iterations):
        start = iteration * 200 * MS
        for phase, begin, end in (("forward", 0, 50), ("backward", 50, 100), ("update", 100, 200)):
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
            rank.add("ops", name=name, resource=resource, iteration=iteration, subgroup=0, bytes=size, **times)
    return builder.build()


def test_storage_use__counts_each_wait_for_the_direction_that_ended_in_it() -> None:
    read, write = storage_use(swapped_job(gradients=True))
    assert (read.direction, read.wait_ms, read.in_flight_ms, read.hidden_share) == ("read", 20.0, 40.0, 0.5)
    assert (read.bytes, read.gradient_bytes, read.requests) == (12 * SUBGROUP, 0.0, 1.0)
    assert (write.direction, write.wait_ms, write.in_flight_ms, write.hidden_share) == ("write", 10.0, 10.0, 0.0)
    assert (write.bytes, write.gradient_bytes, write.requests) == (16 * SUBGROUP, 4 * SUBGROUP, 2.0)


def test_substep_lanes__draw_reads_and_writes_beside_the_substeps() -> None:
    lanes = dict(substep_lanes(swapped_job(), 0))
    assert list(lanes) == ["sub-steps", "storage_read", "storage_write"]
    assert set(lanes["sub-steps"]["name"]) == {"prepare", "wait", "update"}


def test_findings__are_about_the_settings_that_cause_the_waits() -> None:
    def advice_by_rule(trace: Trace) -> dict[str, str]:
        return {finding.rule: finding.advice for finding in find(trace).findings}

    best = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    rules = {"storage-waits", "gradients-on-storage", "few-swap-buffers", "lost-moments"}
    default = advice_by_rule(swapped_job(gradients=True))
    assert rules & default.keys() == {"storage-waits", "gradients-on-storage", "few-swap-buffers"}
    assert f"aio.block_size to {4 * SUBGROUP:,}" in default["gradients-on-storage"]
    assert "pipeline_read" in default["storage-waits"]
    assert rules & advice_by_rule(swapped_job(waits_ms=19, **best)).keys() == set()
    assert "pipeline_read" not in advice_by_rule(swapped_job(**best))["storage-waits"]


def test_swap_buffer_bytes__counts_buffers_and_gradients_in_host_memory() -> None:
    default = JobMetrics(swapped_job(gradients=True))
    better = JobMetrics(swapped_job(buffer_count=12))
    assert swap_buffer_bytes(default) == (4 * 4 + 4) * SUBGROUP
    assert swap_buffer_bytes(better) == (12 * 4 + 4 + 4) * SUBGROUP
