"""The optimizer state that fits on the device: the same answer in findings, replay and
recommendation."""

from __future__ import annotations

import pytest

from ebbtide.analysis.metrics.device_fit import gradient_starts
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.static_split import largest_split
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import find_machine
from tests.analysis.findings.jobs import GIB, PARAMS, Job, offloaded, split_by_stub

MACHINE = find_machine("h100-80gb-sxm-published")


def fits_in_replay(workload_source: object) -> bool | None:
    workload = workload_of(workload_source)  # type: ignore[arg-type]
    return simulate(
        make_plan("gpu-only", workload, MACHINE), workload, MACHINE
    ).fits_device(None)


def fits_in_findings(metrics: JobMetrics) -> bool:
    split = largest_split(metrics)
    return split is not None and split.ratio == 0


@pytest.mark.usefixtures("stub_framework")
@pytest.mark.parametrize(
    ("free_bytes", "fits"), [(12.5e9, False), (13.9e9, False), (14.1e9, True)]
)
def test_largest_split__counts_gradients_as_replay_does(
    free_bytes: float, fits: bool
) -> None:
    """All state has 12 B a parameter, and the gradients beside it 2 B."""
    trace = split_by_stub(None, version="10", used=80 - free_bytes / GIB).trace
    assert fits_in_findings(JobMetrics(trace)) == fits_in_replay(trace) == fits


def with_room_after_backward() -> Job:
    """Return a job with 12.5 GB free from the forward to the middle of the backward,
    and else 15 GB."""
    job = offloaded(used=80 - 15e9 / GIB).memory(
        "device", {"forward": 80 - 12.5e9 / GIB}
    )
    for begin in job.begins[0, "backward"]:
        job.builder.rank(0).memory(
            begin + round(job.ms["backward"] * 5e5), round(80 * GIB - 15e9)
        )
    return job


def test_largest_split__counts_fp32_gradients_all_the_time() -> None:
    trace = with_room_after_backward().trace
    metrics = JobMetrics(trace)
    # Of 12.5 GB 16 B a parameter: 7 of 10 subgroups, whatever the backward releases.
    split = largest_split(metrics)
    assert split is not None
    assert split.moved_params == pytest.approx(0.7e9)
    assert metrics.offloaded_params == PARAMS


def test_gradient_starts__are_in_reverse_or_all_at_the_start() -> None:
    assert gradient_starts((1, 3, 4), 10.0, 8.0, accumulates=False) == [
        17.0,
        14.0,
        10.0,
    ]
    assert gradient_starts((1, 3, 4), 10.0, 8.0, accumulates=True) == [0.0, 0.0, 0.0]
