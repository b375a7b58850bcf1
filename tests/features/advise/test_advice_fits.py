"""Settings that findings, `replay --recommend` and `plan` print fit, by the schedules of exactly these settings."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.static_split import largest_split
from ebbtide.features.advise.changes import share_host
from ebbtide.features.advise.choice import fits_memory
from ebbtide.features.advise.job.memory import place
from ebbtide.features.advise.job.sources import BatchSettings, job_of_trace
from ebbtide.features.advise.machine_plan import plan_for_machine
from ebbtide.features.advise.recommendation import recommend
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recorded_job import recorded_job
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, TraceBuilder, open_trace
from tests.conftest import seeded, slow_case

TRACES = Path(__file__).parents[3] / "traces"
PUBLISHED = sorted(path.stem for path in TRACES.glob("*.ebb") if path.stem != "a100-torch-profiler")
MACHINES = ("a100-40gb-published", "h100-80gb-sxm-published")
GIB, MS = 2**30, 10**6
VERSIONS = ("0.13.3", "0.17.0", "0.18.0", "0.19.8")


def steps_of(policy: str, workload: Workload, machine: Machine) -> Steps:
    return simulate_steps(make_plan(policy, workload, machine), workload, machine)


def advised_settings(trace: Trace) -> dict[str, Any]:
    """Return the settings in findings: the ratio that they say to fit, and an advised sub_group_size."""
    settings: dict[str, Any] = {}
    if (split := largest_split(JobMetrics(trace))) is not None:
        settings["ratio"] = split.ratio
    for finding in find(trace).findings:
        for value in re.findall(r'"sub_group_size": ([\d.]+)', finding.advice):
            settings["sub_group_size"] = float(value)
    return settings


def check_findings(trace: Trace, workload: Workload, machine: Machine) -> int:
    settings = advised_settings(trace)
    if "ratio" in settings:
        policy = f"twin-flow:{settings['ratio']:g}"
        assert steps_of(policy, workload, machine).valid.fits_device(None), policy
    if "sub_group_size" in settings:
        zero = trace.meta.deepspeed.config["zero_optimization"]  # type: ignore[union-attr]
        finer = replace(workload, sizes=None, subgroup_params=round(settings["sub_group_size"]))
        policy = f"twin-flow:{zero['offload_optimizer']['ratio']:g}"
        assert steps_of(policy, finer, machine).valid.fits_device(None), settings
    return len(settings)


def pasted_policy(code: str) -> str:
    """Return the policy that a call of `enable` or `InterleavedAdamW` asks for."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("enable", "InterleavedAdamW")
    )
    words = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    return words["policy"] + (f",overlap={words['overlap']}" if "overlap" in words else "")


def check_recommendation(trace: Trace, workload: Workload, machine: Machine) -> int:
    advice = recommend(workload, machine, recorded_job(trace))
    if "does not fit" in advice.line:
        simple = ("gpu-only", "pipelined", *(f"twin-flow:{share / 20:g}" for share in range(21)))
        assert not any(fits_memory(steps_of(policy, workload, machine), machine) for policy in simple)
        return 0
    for setup in advice.setups:
        policies = {setup.policy, *map(pasted_policy, filter(None, (setup.code, setup.optimizer_code)))}
        if setup.code is None and setup.optimizer_code is None:
            offload = setup.deepspeed_config["zero_optimization"]["offload_optimizer"]
            policies.add("gpu-only" if offload["device"] == "none" else f"twin-flow:{offload['ratio']:g}")
        for policy in policies:
            assert fits_memory(steps_of(policy, workload, machine), machine), policy
    if advice.deepspeed is not None:
        ratio = advice.deepspeed["offload_optimizer"]["ratio"]
        assert fits_memory(steps_of(f"twin-flow:{ratio:g}", workload, machine), machine)
    for system in advice.systems:
        assert fits_memory(steps_of(system.policy, workload, machine), machine), system.policy
    return len(advice.setups) + len(advice.systems)


def check_plan(trace: Trace, machine: Machine) -> int:
    job = job_of_trace(trace, BatchSettings())
    plan = plan_for_machine(job, machine)
    if plan.policy is None or plan.settings is None:
        return 0
    shared = share_host(machine, plan.settings.ranks)
    placed = place(job, plan.settings, shared)
    for policy in (plan.policy, *(other.policy for other in plan.policies)):
        assert fits_memory(steps_of(policy, placed.workload, shared), shared), policy
    assert plan.lines is not None
    if "InterleavedAdamW" in plan.lines.optimizer:
        assert fits_memory(steps_of(pasted_policy(plan.lines.optimizer), placed.workload, shared), shared)
    return 1


def check_all(trace: Trace, machine: Machine) -> int:
    """Check all advice on a trace; returns how many settings there were."""
    workload = workload_of(trace)
    checked = check_findings(trace, workload, machine) + check_recommendation(trace, workload, machine)
    return checked + check_plan(trace, machine)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("machine", MACHINES)
def test_advice__fits_on_published_runs(name: str, machine: str) -> None:
    trace = open_trace(TRACES / f"{name}.ebb")
    # Where no whole subgroup fits beside the job, only a policy is advised.
    assert check_all(trace, find_machine(machine)) >= 1


def random_trace(random: random.Random) -> Trace:
    """Return a DeepSpeed job that offloads, with any subgroups, ratio, version, micro-steps and use of memory."""
    count, size = random.randint(1, 24), round(10 ** random.uniform(7.5, 9))
    equal = random.random() < 0.3
    sizes = [size if equal else max(1, round(size * random.uniform(0.2, 2))) for _ in range(count)]
    params = sum(sizes)
    ratio = random.choice([1.0, 1.0, round(random.random(), 2)])
    ranks, micro_steps = random.choice([1, 1, 2]), random.choice([1, 1, 1, 3])
    offload = {"device": "cpu", "pin_memory": True, "ratio": ratio}
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": max(sizes)},
        "train_micro_batch_size_per_gpu": random.choice([1, 4]),
        "gradient_accumulation_steps": micro_steps,
    }
    recorded = random.random() < 0.7
    version = random.choice(VERSIONS)
    builder = TraceBuilder(
        "recorded",
        deepspeed={"version": version, "stage": 3, "config": config, "subgroup_params": sizes if recorded else []},
    )
    # From much too little to enough for all of the state and its gradients.
    capacity = round(params * random.uniform(3, 25)) + 2 * GIB
    base = 2 * params + GIB // 2
    state = {"torch.float32": 2 * params}
    for number in range(ranks):
        rank = builder.rank(
            number,
            world_size=ranks,
            host="node",
            first_iteration_start_ns=0,
            devices=[{"device": f"cuda:{number}", "kind": "cuda", "capacity_bytes": capacity, "name": "a device"}],
            model={"classes": ["GPT"], "params": params, "total_params": params, "dtypes": {"torch.bfloat16": params}},
            optimizers=[
                {"class": "DeepSpeedCPUAdam", "params": params, "state_dtypes": state, "state_devices": ["cpu"]}
            ],
        )
        most = random.random() * max(0, capacity - base)
        peaks = [base + round(most * random.uniform(0, 1)) for _ in range(6)]
        if random.random() < 0.1:
            # As a dry run predicts a job that does not fit.
            peaks[random.randrange(6)] = capacity + GIB
        lengths = [round(random.uniform(1, 200)) * MS for _ in range(4)]
        now = 0
        for iteration in range(6):
            now += random.choice([0, lengths[3]]) if ranks == 1 else lengths[3]
            for micro_step in range(micro_steps):
                for phase, length, sizes_in_phase in (
                    ("forward", lengths[0], peaks[:2]),
                    ("backward", lengths[1], peaks[2:5]),
                ):
                    for part, used in enumerate(sizes_in_phase):
                        rank.memory(now + part * length // len(sizes_in_phase), used, "device", f"cuda:{number}")
                    rank.phase(phase, now, now + length, iteration, micro_step)
                    now += length
            rank.memory(now, peaks[5], "device", f"cuda:{number}")
            rank.phase("update", now, now + lengths[2], iteration)
            now += lengths[2]
    return builder.build()


def check_random(first: int, count: int) -> int:
    checked = 0
    for number in range(first, first + count):
        with seeded(f"advice {number}") as generator:
            checked += check_all(random_trace(generator), find_machine(generator.choice(MACHINES)))
    return checked


@pytest.mark.parametrize(("first", "count"), [(30, 1), *(slow_case(first, 3) for first in range(0, 37, 3))])
def test_advice__fits_on_random_jobs(first: int, count: int) -> None:
    assert check_random(first, count) > 2 * count


def test_advice__finds_a_split_where_the_host_is_too_small_and_free_device_memory_is_not_known() -> None:
    assert check_random(1374, 1) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 50))
def test_advice__fits_on_500_random_jobs(first: int) -> None:
    assert check_random(first, 50) > 100
