"""Workloads and policies of recorded DeepSpeed jobs."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.metrics.state_split import Framework
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_job import recorded_policy
from ebbtide.interleave.replay.replay import replay
from ebbtide.interleave.replay.workload_from_trace import workload_of
from tests.analysis.findings.jobs import GIB, PARAMS, Job, offloaded
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job
from tests.interleave.job_files import machine

POOL_NOTE = "free device memory: capacity minus device"


def configured(
    job: Job, offload: Any = None, version: str = "0.19.5", **zero: Any
) -> Job:
    """Add a DeepSpeed configuration to a job."""
    config = {
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "offload_optimizer": offload or {"device": "cpu"},
            **zero,
        },
    }
    job.builder.meta["deepspeed"] = {"version": version, "config": config}
    return job


def test_workload_of__reads_a_recorded_deepspeed_job() -> None:
    sizes = (SIZE, SIZE // 2 + 7, SIZE // 4)  # 7 of them padding
    builder = deepspeed_job(sizes=sizes, ratio=0.5, devices=("cuda", "cpu", "cpu"))
    builder.rank(0).meta["optimizers"][0]["params"] -= 7
    trace = builder.build()
    job = workload_of(trace)
    assert (job.params, job.sizes, job.subgroup_params) == (sum(sizes), sizes, SIZE)
    assert (job.param_bytes, job.state_bytes, job.clipping) == (2, 12, True)
    assert recorded_policy(trace) == "twin-flow:0.5,grads=async"
    # Copying blocked the host for 20 ms of the backward, as measured; the replay is
    # without it.
    assert job.backward_s == pytest.approx(0.28)
    assert job.notes == (
        "the recorded backward waited about 20 ms for gradient copies (an estimate): "
        "replayed without that wait",
        POOL_NOTE,
    )
    # Resident state counts as free: its real share, 100 of 175 M parameters.
    assert job.gpu_free is not None
    resident = 16 * (sum(sizes) - 7) * SIZE / sum(sizes)
    assert job.gpu_free[0] == (0, pytest.approx(40 * GIB + resident))


def test_recorded_policy__is_that_of_ebbtides_engine_if_it_ran() -> None:
    trace = deepspeed_job(ratio=0.5, policy="interleaved:2,grads=async").build()
    assert recorded_policy(trace) == "interleaved:2,grads=async"
    # The engine rounds as a current DeepSpeed, under any version.
    assert workload_of(trace).framework is None


@pytest.mark.parametrize(
    ("version", "resident"), [("0.13.3+c7da512a", {2, 3, 4}), ("0.19.5", {0, 1})]
)
def test_workload_of__keeps_the_version_that_rounds_resident_subgroups(
    version: str, resident: set[int]
) -> None:
    """Half of five subgroups: int(2.5) on the CPU up to 0.17, int(2.5) on the GPU from
    0.18 on."""
    builder = deepspeed_job(sizes=(SIZE,) * 5, ratio=0.5)
    builder.meta["deepspeed"]["version"] = version
    trace = builder.build()
    policy = recorded_policy(trace)
    assert policy is not None
    assert workload_of(trace).framework == Framework("deepspeed", version)
    assert make_plan(policy, workload_of(trace), machine()).resident == resident


@pytest.mark.parametrize(
    ("stage", "policy"),
    [(2, "zero-offload,grads=async"), (3, "twin-flow:0.3,grads=async")],
)
def test_recorded_policy__has_a_ratio_under_zero_3_only(
    stage: int, policy: str
) -> None:
    assert recorded_policy(deepspeed_job(ratio=0.3, stage=stage).build()) == policy


@pytest.mark.parametrize("clipping", [0.0, None, 1.0])
def test_workload_of__clips_under_deepspeed_with_any_configuration(
    clipping: float | None,
) -> None:
    job = configured(offloaded(1))
    job.builder.meta["deepspeed"]["config"]["gradient_clipping"] = clipping
    assert workload_of(job.trace) == workload_of(configured(offloaded(1)).trace)
    assert workload_of(job.trace).clipping


CONFIGURATIONS = [
    ({"device": "cpu"}, "0.19.5", "zero-offload,grads=async"),
    ({"device": "cpu"}, "0.19.4+cu12", "zero-offload,grads=blocking"),
    ({"device": "cpu"}, "0.20", "zero-offload,grads=async"),
    ({"device": "cpu", "ratio": 0.3}, "0.19.5", "twin-flow:0.3,grads=async"),
    (
        {"device": "cpu", "part_grads_async": False},
        "1.0",
        "zero-offload,grads=blocking",
    ),
    (
        {"device": "cpu", "prefetch_optimizer": True, "prefetch_optimizer_gap": 3},
        "1.0",
        "interleaved:3@1,grads=async",
    ),
    (
        {"device": "cpu", "prefetch_optimizer": False, "prefetch_optimizer_gap": 3},
        "1.0",
        "zero-offload,grads=async",
    ),
    ({"device": "nvme"}, "1.0", None),
    ({"device": "cpu", "ratio": "auto"}, "1.0", None),
    (
        {"device": "cpu", "prefetch_optimizer": True, "prefetch_optimizer_gap": "auto"},
        "1.0",
        None,
    ),
    ("cpu", "1.0", None),
]


def test_recorded_policy__follows_from_the_configuration() -> None:
    for offload, version, policy in CONFIGURATIONS:
        trace = configured(offloaded(1), offload, version).trace
        assert recorded_policy(trace) == policy
        if policy is not None:
            assert (
                replay(workload_of(trace), machine(), [policy]).results[0].policy
                == policy
            )


@pytest.mark.parametrize(
    "config",
    [None, "ds.json", [], {"zero_optimization": []}, {"zero_optimization": {}}],
)
def test_recorded_policy__is_none_for_malformed_configurations(config: Any) -> None:
    job = offloaded(1)
    job.builder.meta["deepspeed"] = {"config": config}
    assert recorded_policy(job.trace) is None
    assert workload_of(job.trace).params == PARAMS


@pytest.mark.parametrize(
    "printed", [[6 * 10**8, 4 * 10**8], [2 * 10**9, -(10**9)], "many", None]
)
def test_subgroups__are_those_printed_or_configured(printed: Any) -> None:
    job = configured(offloaded(1), sub_group_size=25e7)
    job.builder.meta["deepspeed"]["subgroup_params"] = printed
    is_valid = printed == [6 * 10**8, 4 * 10**8]
    assert workload_of(job.trace).subgroups == (
        tuple(printed) if is_valid else (25 * 10**7,) * 4
    )
    assert workload_of(
        configured(offloaded(1), sub_group_size=1e12).trace
    ).subgroups == (PARAMS,)
