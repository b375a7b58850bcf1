"""The lines to paste for a policy: a configuration of DeepSpeed and lines of Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.policies import parse
from ebbtide.interleave.replay.recommend.calls import enable_code, optimizer_code
from ebbtide.interleave.replay.recommend.configuration import deepspeed_config
from ebbtide.interleave.replay.recommend.overlap_choice import OverlapChoice
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine

# Policies that DeepSpeed has by itself.
_DEEPSPEED_POLICIES = ("zero-offload", "twin-flow", "gpu-only")


@dataclass(frozen=True)
class PolicySetup:
    """The lines to paste for one policy.

    Attributes:
        policy: The policy's string.
        iteration_ms: Its predicted iteration time.
        deepspeed_config: A configuration that `deepspeed.initialize` accepts.
        code: Lines of Python to run before `deepspeed.initialize`; None if the configuration suffices.
        optimizer_code: Lines of Python for a job without DeepSpeed; None for a policy that DeepSpeed has by itself.
        uses_storage: Whether state is in storage. Then the configuration of DeepSpeed does not do without `code`.
    """

    policy: str
    iteration_ms: float
    deepspeed_config: dict[str, Any]
    code: str | None
    optimizer_code: str | None
    uses_storage: bool = False


def setup_of(schedule: Schedule, job: RecordedJob, machine: Machine, machine_source: str | None) -> PolicySetup:
    """Return the lines to paste for the policy of a schedule.

    Args:
        schedule: The schedule.
        job: Settings of the job that the lines repeat.
        machine: The machine that the plan was made for.
        machine_source: Its file or preset; None if the job is to measure it.
    """
    policy = parse(schedule.plan.policy)
    workload, iteration_ms = schedule.workload, schedule.iteration_s * 1e3
    stored = bool(schedule.plan.stored)
    if policy.name not in _DEEPSPEED_POLICIES or stored:
        config = deepspeed_config(workload, job, 1.0)
        machine_call = machine_code(machine, machine_source)
        call = None if job.offloads_params else enable_code(schedule, machine, machine_call)
        own_call = optimizer_code(schedule, job, machine, machine_call)
        return PolicySetup(policy.text, iteration_ms, config, call, own_call, stored)
    ratio = {"gpu-only": None, "zero-offload": 1.0}.get(policy.name, float(policy.value or 1.0))
    # Only a split needs stage 3.
    stage = 3 if policy.name == "twin-flow" else job.stage or 3
    return PolicySetup(policy.text, iteration_ms, deepspeed_config(workload, job, ratio, stage), None, None)


def overlapped_setup(
    choice: OverlapChoice,
    deepspeed: OverlapChoice | None,
    plain: PolicySetup,
    job: RecordedJob,
    machine: Machine,
    machine_source: str | None,
) -> PolicySetup:
    """Return the lines to paste for a policy with updates beside the step.

    Args:
        choice: The policy with overlap.
        deepspeed: The same with the widest overlap that `enable` takes; None if that gains little.
        plain: The lines of the same policy without overlap.
        job: Settings of the job that the lines repeat.
        machine: The machine that the plan was made for.
        machine_source: Its file or preset; None if the job is to measure it.
    """
    schedule, machine_call = choice.steps.valid, machine_code(machine, machine_source)
    code = plain.code
    if code is not None and deepspeed is not None:
        code = enable_code(deepspeed.steps.valid, machine, machine_call, deepspeed.option)
    if code is not None and (deepspeed is None or deepspeed.option != choice.option):
        seconds, option = (choice.without_s, "none") if deepspeed is None else (deepspeed.iteration_s, deepspeed.option)
        code = f"# DeepSpeed runs it with overlap={option}: {seconds * 1e3:,.0f} ms an iteration.\n{code}"
    return replace(
        plain,
        policy=schedule.plan.policy,
        iteration_ms=choice.iteration_s * 1e3,
        code=code,
        uses_storage=bool(schedule.plan.stored),
        optimizer_code=optimizer_code(schedule, job, machine, machine_call, choice.option),
    )


def machine_code(machine: Machine, source: str | None) -> str | None:
    """Return an expression for the machine, with the rates for as many ranks on a host as here."""
    if source is None:
        return None
    code = f"find_machine({json.dumps(source)})"
    return code if machine.box is None else f"{code}.for_ranks({machine.box.ranks})"
