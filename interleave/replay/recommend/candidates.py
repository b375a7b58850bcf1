"""The schedules that a recommendation chooses from: the best variant of each policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.interleave.simulation.steps import Steps, simulate_steps
from ebbtide.machines.machine import Machine

_MAX_STRIDE = 10


def simulated(policy: str, workload: Workload, machine: Machine) -> Schedule | None:
    """Return a policy's schedule; None if the machine lacks a rate or the policy cannot plan the workload."""
    try:
        return simulate(make_plan(policy, workload, machine), workload, machine)
    except (MachineError, PolicyError):
        return None


def steps_of(policy: str, workload: Workload, machine: Machine) -> Steps | None:
    """Return a policy's schedules of both kinds of steps; None as in `simulated`."""
    try:
        return simulate_steps(make_plan(policy, workload, machine), workload, machine)
    except (MachineError, PolicyError):
        return None


def best_static_split(workload: Workload, machine: Machine) -> Schedule | None:
    """Return the fastest static split without storage that fits the device; None if none does.

    Of ratios that DeepSpeed rounds to the same subgroups it is the largest.
    """
    machine = replace(machine, storage=())
    best = None
    for ratio in (share / 20 for share in range(20, -1, -1)):
        policy = f"twin-flow:{ratio:g}" if ratio < 1 else "zero-offload"
        schedule = simulated(policy, workload, machine)
        # If the free memory is not known, only a plan that needs no device memory is sure to fit.
        fits = schedule is not None and schedule.fits_device(machine.gpu_memory_bytes)
        if schedule is not None and fits and (best is None or schedule.iteration_s < best.iteration_s):
            best = schedule
    return best


def other_schedules(best: Schedule, split: Schedule | None, workload: Workload, machine: Machine) -> list[Schedule]:
    """Return the best variant of each other policy that fits the device, or may fit it, fastest first.

    Args:
        best: The schedule of the recommended policy.
        split: The best static split.
        workload: The workload.
        machine: The machine.
    """
    strides = range(1, _MAX_STRIDE + 1) if workload.gpu_free is not None else (2,)
    interleaved = [simulated(f"interleaved:{stride}", workload, machine) for stride in strides]
    fixed = [simulated(policy, workload, machine) for policy in ("zero-offload", "pipelined")]
    candidates = [*fixed, _fastest(interleaved, machine), split]
    # A split may be zero-offload, and the best policy one of these.
    by_policy = {schedule.plan.policy: schedule for schedule in candidates if schedule is not None}
    others = [
        schedule for policy, schedule in by_policy.items() if policy != best.plan.policy and _may_fit(schedule, machine)
    ]
    return sorted(others, key=lambda schedule: schedule.iteration_s)


def _fastest(schedules: Iterable[Schedule | None], machine: Machine) -> Schedule | None:
    fitting = [schedule for schedule in schedules if schedule is not None and _may_fit(schedule, machine)]
    return min(fitting, key=lambda schedule: schedule.iteration_s, default=None)


def _may_fit(schedule: Schedule, machine: Machine) -> bool:
    return schedule.fits_device(machine.gpu_memory_bytes) is not False
