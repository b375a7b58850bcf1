"""Plans of a job for a machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import MachineError
from ebbtide.features.advise import choice
from ebbtide.features.advise.job.memory import place
from ebbtide.features.advise.job.sources import BatchSettings, job_of_workload
from ebbtide.features.advise.machine_plan import (
    MachinePlan,
    PlanRequest,
    fastest_plans,
    place_job,
    plan_for_machine,
)
from ebbtide.interleave.model.workload import workload_from
from ebbtide.interleave.policies import as_policies
from ebbtide.interleave.simulation.simulator import Steps
from ebbtide.machines.catalog import preset
from tests.conftest import examples, slow_case
from tests.features.advise.jobs import gpu_machine, sized
from tests.interleave.job_files import WORKLOAD, machine

FIGURES = (
    "policy",
    "device_bytes",
    "host_bytes",
    "iteration",
    "tokens_per_s",
    "limited_by",
    "code",
)


@settings(max_examples=examples(8, by_default=2))
@given(
    device=st.sampled_from([3e9, 8e9, 24e9, 48e9, 80e9]),
    host=st.sampled_from([2e6, 16e9, 60e9]),
    params=st.sampled_from([1e9, 2e9, 7e9]),
)
def test_plan_for_machine__has_a_change_if_and_only_if_the_job_does_not_fit(
    device: float, host: float, params: float
) -> None:
    target = gpu_machine(gpu_memory_bytes=device, host_memory_bytes=host)
    plan = plan_for_machine(sized(params), target, PlanRequest(price_per_hour=2.0))
    figures = [getattr(plan, name) for name in FIGURES]
    if plan.policy is None:
        assert (plan.fits, plan.change, set(figures)) == (False, None, {None})
        return
    assert None not in figures
    assert plan.fits == (plan.change is None)
    assert plan.device_bytes is not None
    assert plan.device_bytes <= device * (1 + 1e-9) + 1
    assert plan.host_bytes is not None
    assert plan.host_capacity_bytes is not None
    assert plan.host_bytes <= plan.host_capacity_bytes
    assert plan.iteration is not None
    assert plan.iteration.low < plan.iteration.likely < plan.iteration.high
    json.dumps(plan.as_json())


def fitting_plan(**request: float) -> MachinePlan:
    return plan_for_machine(sized(), gpu_machine(), PlanRequest(**request))  # type: ignore[arg-type]


def test_plan_for_machine__costs_the_hosts_for_the_time_of_a_billion_tokens() -> None:
    plan = fitting_plan(price_per_hour=3.6)
    assert plan.iteration is not None
    assert plan.tokens_per_s is not None
    assert plan.cost is not None
    rate = plan.tokens_per_s.likely
    assert rate == pytest.approx(2048 / plan.iteration.likely * 1e3)
    assert plan.cost.likely == pytest.approx(3.6 / 3600 * 1e9 / rate)
    assert plan.cost.low < plan.cost.likely < plan.cost.high
    # Sixteen ranks need two hosts of eight.
    assert plan_for_machine(sized(ranks=16), gpu_machine()).hosts == 2
    assert fitting_plan().cost is None


@pytest.mark.parametrize(
    ("device", "ranks", "checkpointing"),
    [
        (9e9, 2, True),
        (80e9, 1, False),
        slow_case(9e9, 1, False),
        slow_case(80e9, 2, True),
    ],
)
def test_plan_for_machine__its_lines_are_python(
    device: float, ranks: int, checkpointing: bool
) -> None:
    job = sized(ranks=ranks, checkpointing=checkpointing)
    plan = plan_for_machine(
        job, gpu_machine(gpu_memory_bytes=device, host_memory_bytes=4e11)
    )
    assert plan.code is not None
    compile(plan.code, "plan", "exec")
    assert plan.settings is not None
    assert ("fully_shard" in plan.code) == (plan.settings.ranks > 1)
    assert ("checkpoint(layer)" in plan.code) == plan.settings.checkpointing
    assert ("InterleavedAdamW" in plan.code) == (plan.policy != "gpu-only")


def test_plan_for_machine__keeps_to_the_requested_policies() -> None:
    policies = ("zero-offload", "interleaved:2")
    plan = plan_for_machine(
        sized(), gpu_machine(), PlanRequest(policies=as_policies(policies))
    )
    assert {time.policy for time in plan.policies} == set(policies)
    assert plan.change == {"policy": plan.policy}
    assert plan.policy == plan.policies[0].policy
    assert (
        plan_for_machine(
            sized(), gpu_machine(), PlanRequest(policies=as_policies(("gpu-only",)))
        ).policy
        == "gpu-only"
    )


def test_plan_for_machine__names_what_limits_the_iteration() -> None:
    """A slow CPU, a slow link and slow host memory, with everything offloaded; and a
    GPU without offload."""
    offload = PlanRequest(policies=as_policies(("zero-offload",)))
    rates = {"box": None, "host_memory_bytes_per_s": 1e13}
    slow_cpu = gpu_machine(**rates, cpu_update_params_per_s=1e8)
    assert plan_for_machine(sized(), slow_cpu, offload).limited_by == "cpu update"
    slow_memory = gpu_machine(box=None, host_memory_bytes_per_s=2e9)
    assert plan_for_machine(sized(), slow_memory, offload).limited_by == "host memory"
    slow_link = gpu_machine(
        **rates, h2d_pageable_bytes_per_s=1e8, cpu_update_params_per_s=1e11
    )
    assert plan_for_machine(sized(), slow_link, offload).limited_by == "h2d"
    assert (
        plan_for_machine(
            sized(micro_batch=8), gpu_machine(gpu_memory_bytes=4e11)
        ).limited_by
        == "compute"
    )
    slow_peers = gpu_machine(
        gpu_memory_bytes=4e11,
        gpu={"flops_per_s": {"bfloat16": 3e14}, "peer_bytes_per_s": 1e9},
    )
    assert plan_for_machine(sized(ranks=8), slow_peers).limited_by == "collectives"


def test_plan_for_machine__needs_the_peak_of_the_gpu_for_a_size() -> None:
    with pytest.raises(MachineError, match=r"gpu\.flops_per_s"):
        plan_for_machine(sized(), gpu_machine(gpu=None))


def test_plan_for_machine__says_what_is_missing_where_nothing_helps() -> None:
    """Activations of one layer and the logits need more than the device has with any
    number of ranks."""
    plan = plan_for_machine(sized(), gpu_machine(gpu_memory_bytes=1.2e9))
    assert plan.policy is None
    assert "of device memory are missing" in plan.notes[0]


def test_plan_for_machine__free_memory_of_a_workload_file_stays() -> None:
    job = job_of_workload(workload_from(WORKLOAD, "job"), BatchSettings())
    free = place(job, job.settings, machine()).workload.gpu_free
    assert free is not None
    assert [at_s for at_s, _ in free] == pytest.approx([0.0, 0.2, 0.8])
    assert [size for _, size in free] == [20e9, 6e9, 30e9]
    smaller = place(
        job, job.settings, replace(machine(), gpu_memory_bytes=10e9)
    ).workload.gpu_free
    assert smaller is not None
    assert max(size for _, size in smaller) == 10e9


def test_fastest_plans__times_those_that_may_be_among_the_first() -> None:
    job = sized()
    offloading = {"gpu_memory_bytes": 24e9, "host_memory_bytes": 2e11}
    slower = gpu_machine(
        name="slower", h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, **offloading
    )
    targets = [
        slower,
        gpu_machine(name="searched", **offloading),
        gpu_machine(name="whole"),
    ]
    first, second, third = fastest_plans(
        [place_job(job, one) for one in targets], "iteration", 2
    )
    expected = [plan_for_machine(job, one).as_json() for one in targets]
    assert [second.as_json(), third.as_json()] == expected[1:]
    assert (first.policy, first.iteration, first.policies, first.code) == (
        None,
        None,
        (),
        None,
    )
    # What a line above the table says of it does not need its times.
    assert (first.fits, list(first.change or {}), first.settings) == (
        False,
        ["policy"],
        plan_for_machine(job, slower).settings,
    )
    assert expected[0]["iteration_low_ms"] > expected[1]["iteration_high_ms"]


def test_fastest_plans__times_all_where_costs_are_not_known() -> None:
    target = gpu_machine(gpu_memory_bytes=24e9, host_memory_bytes=2e11)
    plans = fastest_plans(
        [place_job(sized(), target), place_job(sized(), target)], "cost", 1
    )
    assert None not in {plan.policy for plan in plans}


def test_plan_for_machine__searches_for_the_overlap_of_deepspeed_only_for_its_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def choose(best: Steps, option: str, *inputs: object) -> None:
        asked.append(option)

    monkeypatch.setattr(choice, "choose_overlap", choose)
    plan = plan_for_machine(
        sized(), gpu_machine(gpu_memory_bytes=24e9, host_memory_bytes=2e11)
    )
    assert asked == [choice.OPTIMIZER_OVERLAP]
    assert plan.choice is not None
    assert plan.choice.deepspeed_overlap is None
    assert asked == [choice.OPTIMIZER_OVERLAP, choice.DEEPSPEED_OVERLAP]


def test_plan_for_machine__of_a_size_is_what_published_predictions_are() -> None:
    """Without offload a step is forward, backward and the kernels of the update, as
    benchmarks/accuracy_jobs.py predicts jobs of others: no time of a framework's step
    is added."""
    job, target = sized(0.1e9, ranks=2), preset("a100-80gb-sxm")
    plan = plan_for_machine(job, target)
    times = place_job(job, target).placed.times
    update_s = 0.1e9 / 2 / (plan.placed.shared.gpu_update_params_per_s or 0.0)
    assert plan.policy == "gpu-only"
    assert plan.iteration is not None
    assert plan.iteration.likely == pytest.approx(
        1e3 * (times.forward_s + times.backward_s + update_s)
    )


def test_plan__of_a_job_that_the_host_does_not_survive_says_so() -> None:
    job = replace(sized(), host_peak_bytes=20e9)
    small, large = (
        plan_for_machine(job, gpu_machine(host_memory_bytes=size, box=None))
        for size in (16e9, 64e9)
    )
    assert large.fits
    assert not small.fits
    assert small.change is None
    assert small.exceeds_host
    (note,) = small.notes
    assert "18.6 of 14.9 GiB of host memory while it loads" in note
    assert small.cheapest is None
