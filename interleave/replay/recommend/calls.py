"""The lines of Python that make a job follow a policy."""

from __future__ import annotations

import json
import math

from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.interleave.policies import parse
from ebbtide.interleave.replay.recommend.configuration import LEARNING_RATE, max_grad_norm
from ebbtide.interleave.replay.recommend.recorded_job import RecordedJob
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, UPDATE

# Stands for the folder of a path that is not known.
STORAGE_FOLDER = "/path/on/a/drive"

Budget = int | dict[str, int]
_ROUNDING = 1e-9


def enable_code(schedule: Schedule, machine: Machine, machine_code: str | None, overlap: str = "none") -> str:
    """Return the call for a DeepSpeed job, which stands before `deepspeed.initialize`.

    Args:
        schedule: The schedule of the policy.
        machine: The machine that the plan was made for.
        machine_code: An expression for the machine that calls `find_machine`; None if the job is to measure it.
        overlap: The overlap to ask for.
    """
    imports, arguments = _common_arguments(schedule, machine_code, overlap)
    # DeepSpeed's subgroups consist of whole tensors and may be larger than its sub_group_size.
    arguments.append(f"subgroup_params={max(schedule.workload.subgroups):_}")
    arguments += _storage_arguments(schedule, machine)
    lines = ["from ebbtide.interleave.deepspeed import enable", *imports]
    return "\n".join([*lines, "", *_call("enable", arguments)])


def optimizer_code(
    schedule: Schedule, job: RecordedJob, machine: Machine, machine_code: str | None, overlap: str = "none"
) -> str:
    """Return the call for a job without DeepSpeed; it needs `model`.

    Args:
        schedule: The schedule of the policy.
        job: The settings to repeat.
        machine: The machine that the plan was made for.
        machine_code: An expression for the machine that calls `find_machine`; None if the job is to measure it.
        overlap: The overlap to ask for.
    """
    workload = schedule.workload
    imports, arguments = _common_arguments(schedule, machine_code, overlap)
    if overlap != "none":
        arguments.append("model=model")
    options = {"lr": LEARNING_RATE, **job.optimizer_options}
    arguments = ["model.parameters()", *(f"{key}={value!r}" for key, value in options.items()), *arguments]
    arguments.append(f"subgroup_params={workload.subgroup_params:_}")
    norm = max_grad_norm(workload, job)
    if norm is not None:
        arguments.append(f"max_grad_norm={norm!r}")
    arguments += _storage_arguments(schedule, machine)
    comments = []
    if not workload.gradients_held_until_step:
        arguments.append('gradients="streamed"')
        comments.append('# Under DistributedDataParallel: gradients="kept".')
    if job.section("fp16").get("enabled"):
        arguments.append('loss_scale="dynamic"')
        comments.append("# Back-propagate optimizer.scale(loss).")
    lines = ["from ebbtide.interleave import InterleavedAdamW", *imports, "", *comments]
    return "\n".join([*lines, *_call("optimizer = InterleavedAdamW", arguments)])


def memory_budget(schedule: Schedule) -> Budget | None:
    """Return the device memory that state may use, in bytes, so that the engine makes the plan of the schedule.

    For `adaptive` it is what each phase leaves free. For other policies it is one number: what is free from the
    backward on, or what the plan needs if that is more.

    Returns:
        None if the free memory is not known, or the plan of a policy other than `adaptive` uses no device memory.
    """
    workload = schedule.workload
    if workload.gpu_free is None:
        return None
    begin_s = workload.compute_s - workload.backward_s
    if parse(schedule.plan.policy).name != "adaptive":
        free = _min_free(workload, begin_s, math.inf)
        return max(int(free), math.ceil(schedule.peak_device_bytes)) if schedule.peak_device_bytes else None
    by_phase = {
        FORWARD: int(_min_free(workload, 0.0, begin_s)),
        BACKWARD: int(_min_free(workload, begin_s, workload.compute_s)),
        UPDATE: int(_min_free(workload, workload.compute_s, math.inf)),
    }
    return by_phase if len(set(by_phase.values())) > 1 else by_phase[UPDATE]


def _min_free(workload: Workload, begin_s: float, end_s: float) -> float:
    """Return the bytes that are free from one time of the iteration to another."""
    steps = workload.gpu_free or ()
    # A step at the end, up to rounding, is one of the next phase.
    end_s -= _ROUNDING * workload.compute_s
    return min([value_at(steps, begin_s), *(size for at_s, size in steps if begin_s < at_s < end_s)])


def _common_arguments(schedule: Schedule, machine_code: str | None, overlap: str) -> tuple[list[str], list[str]]:
    policy, budget = schedule.plan.policy, memory_budget(schedule)
    imports, arguments = [], [f"policy={json.dumps(policy.removesuffix(f',overlap={overlap}'))}"]
    if overlap != "none":
        arguments.append(f"overlap={json.dumps(overlap)}")
    # Plans of other policies do not depend on rates, but for how much they speculate or store.
    uses_rates = parse(policy).name == "adaptive" or schedule.plan.speculated or schedule.plan.stored
    if uses_rates and machine_code is not None:
        imports.append("from ebbtide.machines.catalog import find_machine")
        arguments.append(f"machine={machine_code}")
    if isinstance(budget, dict):
        phases = "".join(f'        "{phase}": {size:_},\n' for phase, size in budget.items())
        arguments.append(f"memory_budget={{\n{phases}    }}")
    elif budget is not None:
        arguments.append(f"memory_budget={budget:_}")
    return imports, arguments


def _storage_arguments(schedule: Schedule, machine: Machine) -> list[str]:
    if not schedule.plan.stored:
        return []
    folders = [path.path or STORAGE_FOLDER for path in machine.storage]
    host_bytes = available_host_bytes(schedule.workload, machine)
    return [f"storage={json.dumps(folders)}", f"host_memory_budget={int(host_bytes or 0):_}"]


def _call(function: str, arguments: list[str]) -> list[str]:
    return [f"{function}(", *(f"    {argument}," for argument in arguments), ")"]
