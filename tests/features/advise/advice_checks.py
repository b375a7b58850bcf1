"""Checks of advice against the job that it is given for: simulated again, and counted
by the framework's own bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.advice import Advice
from ebbtide.analysis.metrics.state_split import Framework
from ebbtide.features.advise.changes import leave_system_share
from ebbtide.features.advise.choice import fits_memory
from ebbtide.features.advise.job.sources import (
    BatchSettings,
    job_of_trace,
    job_of_workload,
)
from ebbtide.features.advise.machine_plan import (
    MachinePlan,
    place_as_it_is,
    plan_for_machine,
)
from ebbtide.features.advise.recommendation import Recommendation, recommend
from ebbtide.features.advise.trace_advice import TraceAdviser
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.inputs import note_other_machine, own_machine, share_box
from ebbtide.interleave.replay.recorded_job import RecordedJob, own_job, recorded_job
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import Steps, simulate_steps
from ebbtide.machines.catalog import preset
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace

MACHINES = (
    "a100-40gb-published",
    "h100-80gb-sxm-published",
    "rtx4090",
    "rtx5090",
    "l40s",
    "a100-40gb-pcie",
    "a100-80gb-sxm",
    "h100-80gb-pcie",
    "h100-80gb",
    "h200",
    "gh200",
    "b200",
)
# Policies that a job of a workload has today; None: not known.
POLICIES = (
    None,
    "zero-offload",
    "zero-offload,grads=blocking",
    "twin-flow:0.5",
    "pipelined",
    "interleaved:2",
    "gpu-only",
)


class Case(NamedTuple):
    """A job on a machine."""

    workload: Workload
    machine: Machine
    job: RecordedJob


def steps_of(policy: str, case: Case) -> Steps:
    own = own_job(case.workload, case.job) if policy == "gpu-only" else case.workload
    return simulate_steps(make_plan(policy, own, case.machine), own, case.machine)


def advised_policy(action: dict[str, Any]) -> str:
    """Return the policy of a setting."""
    settings = action["settings"]
    if action["kind"] == "policy":
        overlap = settings["overlap"]
        return str(settings["policy"]) + (
            f",overlap={overlap}" if overlap != "none" else ""
        )
    offload = settings["offload_optimizer"]
    return (
        "gpu-only" if offload["device"] == "none" else f"twin-flow:{offload['ratio']:g}"
    )


def check(advice: Advice | None, case: Case) -> int:
    """Check advice; returns whether there is some."""
    if advice is None or advice.kind == "activations":
        return 0
    action = advice.as_json()
    policy = advised_policy(action)
    steps = steps_of(policy, case)
    iteration_ms = steps.iteration_s * 1e3
    assert abs(action["simulated_ms"] / iteration_ms - 1) < 1e-6, (
        policy,
        action,
        iteration_ms,
    )
    assert action["fits"]
    assert fits_memory(steps, case.machine), policy
    check_bytes(policy, case)
    recorded_s, own = case.job.recorded_s(case.machine), case.job.policy
    if recorded_s is not None:
        assert iteration_ms < recorded_s * 1e3, (policy, recorded_s)
    if own is not None:
        assert own.removesuffix(",grads=async") != policy
        present = steps_of(own, case)
        if recorded_s is not None or fits_memory(present, case.machine):
            assert iteration_ms < present.iteration_s * 1e3, (policy, own)
            assert abs(action["present_ms"] / present.iteration_s / 1e3 - 1) < 1e-6
    return 1


def check_bytes(policy: str, case: Case) -> None:
    """Count the bytes that DeepSpeed keeps on the device all the time."""
    workload, free = case.workload, case.workload.min_free_bytes
    if free is None:
        return
    sizes, state = workload.subgroups, workload.state_bytes
    if policy.startswith("twin-flow:"):
        resident = workload.split.resident(float(policy.partition(":")[2]), len(sizes))
        assert (state + 4) * sum(sizes[resident.start : resident.stop]) <= free + 1
    if (
        policy == "gpu-only"
        and workload.framework is not None
        and not case.machine.unified_memory
    ):
        assert (state + workload.grad_bytes) * sum(sizes) <= free + 1


def check_recommendation(advice: Recommendation, case: Case) -> int:
    """Check the setting and the split of a recommendation, and that what is kept is no
    setting."""
    split = advice.split_advice
    if split is not None:
        assert advice.deepspeed is not None
        offload = advice.deepspeed["offload_optimizer"]
        assert split.settings == {"offload_optimizer": offload}
    return check(advice.advice, case) + check(split, case)


def check_plan(plan: MachinePlan) -> int:
    """Check the setting of a plan."""
    return check(
        plan.advice,
        Case(plan.placed.placed.workload, plan.placed.shared, plan.placed.recorded),
    )


def check_findings(trace: Trace) -> int:
    """Check the settings in the findings of a trace, on its own machine; the report has
    the same findings."""
    machine = own_machine(trace)
    if machine is None:
        return 0
    case = Case(
        workload_of(trace), share_box(machine, None, trace), recorded_job(trace)
    )
    actions = [finding.action for finding in find(trace, TraceAdviser(trace)).findings]
    return sum(check(action, case) for action in actions)


def case_of(trace: Trace, machine: Machine) -> Case:
    """Return the job of a trace on a machine, as `replay --recommend` takes it."""
    workload, rates = (
        workload_of(trace),
        leave_system_share(share_box(machine, None, trace)),
    )
    if note_other_machine(workload, rates, trace) is workload:
        return Case(workload, rates, recorded_job(trace))
    placed = place_as_it_is(trace, machine)
    return Case(placed.placed.workload, placed.shared, placed.recorded)


def check_trace(trace: Trace, machine: Machine) -> int:
    """Check the recommendation and the plan of a trace for a machine, which name the
    same best policy."""
    case = case_of(trace, machine)
    advice, plan = (
        recommend(*case),
        plan_for_machine(job_of_trace(trace, BatchSettings()), machine),
    )
    if plan.policy is not None and plan.change is None:
        assert advice.policy == plan.policy
        assert plan.iteration is not None
        assert abs(advice.best.iteration_ms / plan.iteration.likely - 1) < 1e-6
    return check_recommendation(advice, case) + check_plan(plan)


def check_workload(random: random.Random) -> int:
    """Check the recommendation and the plan for a random workload on a random
    machine."""
    machine, job = (
        preset(random.choice(MACHINES)).for_ranks(1),
        RecordedJob(policy=random.choice(POLICIES)),
    )
    case = Case(random_workload(random), leave_system_share(machine), job)
    plan = plan_for_machine(job_of_workload(case.workload, BatchSettings()), machine)
    return check_recommendation(recommend(*case), case) + check_plan(plan)


def random_workload(random: random.Random) -> Workload:
    """Return a workload with any sizes, times and free memory."""
    count, size = random.randint(1, 16), round(10 ** random.uniform(7, 9))
    sizes = tuple(max(1, round(size * random.uniform(0.2, 2))) for _ in range(count))
    forward, backward = (10 ** random.uniform(-2, 0.7) for _ in range(2))
    most = sum(sizes) * 18
    steps = tuple(
        (at * (forward + backward), most * random.random() ** 2)
        for at in (0.0, 0.3, 0.7, 1.0)
    )
    return Workload(
        "random",
        sum(sizes),
        max(sizes),
        sizes=sizes,
        forward_s=forward,
        backward_s=backward,
        gpu_free=steps,
        clipping=random.random() < 0.7,
        framework=random.choice(
            [None, Framework("deepspeed", "0.13.3"), Framework("deepspeed", "0.19.8")]
        ),
    )


def traces(folder: Path) -> list[Path]:
    """Return the traces of a folder that can be replayed."""
    return [
        path
        for path in sorted(folder.glob("*.ebb"))
        if path.stem != "a100-torch-profiler"
    ]
