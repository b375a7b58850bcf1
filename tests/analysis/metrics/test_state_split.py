"""The split of the state between device and host: that of `twin-flow`, and that of a
framework."""

import pytest

from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.state_split import Framework, StateSplit, split_of
from ebbtide.analysis.metrics.static_split import job_split
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.workload_from_trace import workload_of
from tests.analysis.findings.jobs import PARAMS, offloaded, split_by_stub
from tests.interleave.job_files import machine


def test_split_of__is_that_of_twin_flow_without_a_framework() -> None:
    for framework in (None, Framework("not-installed", "1.0")):
        split = split_of(framework)
        # (1 - 0.9) * 10 is just less than 1.
        for ratio, resident in ((1.0, 0), (0.9, 0), (0.5, 5), (0.3, 7), (0.0, 10)):
            assert split.resident(ratio, 10) == range(resident)
        assert split.gradient_bytes([3, 2], grad_bytes=2.0, offloads=True) == 20
        assert split.gradient_bytes([3, 2], grad_bytes=2.0, offloads=False) == 10


@pytest.mark.usefixtures("stub_framework")
def test_split_of__is_that_of_the_framework_in_findings_and_plans() -> None:
    trace = split_by_stub(0.5, version="3").trace
    workload = workload_of(trace)
    assert workload.framework == Framework("stub", "3")
    for policy in ("twin-flow:0.5", "interleaved:2@0.5"):
        assert make_plan(policy, workload, machine()).resident == {7, 8, 9}
    assert job_split(JobMetrics(trace)).resident(0.5, 10) == range(7, 10)
    # The key of workload files is that of DeepSpeed's version alone.
    assert workload.as_json()["deepspeed_version"] is None


def test_gpu_only__has_gradient_buffers_of_a_framework_alone(
    stub_framework: None,
) -> None:
    by_framework = workload_of(split_by_stub(0.5, version="3").trace)
    without = workload_of(split_by_stub(0.5).trace)
    plans = [
        make_plan("gpu-only", workload, machine())
        for workload in (by_framework, without)
    ]
    assert [plan.has_gradient_buffers for plan in plans] == [True, False]
    assert [plan.resident_bytes for plan in plans] == [14 * PARAMS, 12 * PARAMS]


def test_job_split__without_a_setup_is_that_of_twin_flow() -> None:
    job = offloaded()
    del job.builder.meta["deepspeed"]
    assert type(job_split(JobMetrics(job.trace))) is StateSplit
