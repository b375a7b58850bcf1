"""Storage use of jobs with known requests and waits."""

from __future__ import annotations

from ebbtide.analysis.metrics.storage_use import storage_use
from ebbtide.analysis.timeline.boxes import substep_lanes
from tests.analysis.metrics.storage_jobs import SUBGROUP, swapped_job


def test_storage_use__counts_each_wait_for_the_direction_that_ended_in_it() -> None:
    read, write = storage_use(swapped_job(gradients=True))
    assert (read.direction, read.wait_ms, read.in_flight_ms, read.hidden_share) == (
        "read",
        20.0,
        40.0,
        0.5,
    )
    assert (read.bytes, read.gradient_bytes, read.requests) == (12 * SUBGROUP, 0.0, 1.0)
    assert (write.direction, write.wait_ms, write.in_flight_ms, write.hidden_share) == (
        "write",
        10.0,
        10.0,
        0.0,
    )
    assert (write.bytes, write.gradient_bytes, write.requests) == (
        16 * SUBGROUP,
        4 * SUBGROUP,
        2.0,
    )


def test_substep_lanes__draw_reads_and_writes_beside_the_substeps() -> None:
    lanes = dict(substep_lanes(swapped_job(), 0))
    assert list(lanes) == ["sub-steps", "storage_read", "storage_write"]
    assert set(lanes["sub-steps"]["name"]) == {"prepare", "wait", "update"}
