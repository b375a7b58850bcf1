"""The choice of a policy: the best one that a machine has memory for, and the best variant of each other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.interleave.model.host_memory import available_host_bytes
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.recommend.candidates import best_static_split, other_schedules, simulated
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text


@dataclass(frozen=True)
class PolicyChoice:
    """The schedules of a workload on a machine that a recommendation is made of.

    Attributes:
        best: The schedule of the chosen policy.
        excess: What memory is too small for it, in words; None if it suffices or is not known.
        split: The best static split, which DeepSpeed has by itself; None if none fits, or nothing is offloaded.
        others: The best variant of each other policy that fits, or may fit, fastest first.
        left_out: Policies that there is too little memory for, and why.
    """

    best: Schedule
    excess: str | None
    split: Schedule | None
    others: tuple[Schedule, ...]
    left_out: dict[str, str]


def choose_policy(workload: Workload, machine: Machine) -> PolicyChoice:
    """Choose a policy: no offload if all state fits, else `adaptive`, or `interleaved:2` if the free memory is unknown.

    Raises:
        MachineError: The machine lacks a rate that the best policy needs.
    """
    on_gpu = without_offload(workload, machine)
    if on_gpu is not None:
        return PolicyChoice(on_gpu, None, None, (), {})
    policy = "adaptive" if workload.gpu_free is not None else "interleaved:2"
    # A rate that is missing is an error here.
    best = simulate(make_plan(policy, workload, machine), workload, machine)
    split = best_static_split(workload, machine)
    if best.plan.stored and split is not None and memory_excess(split, machine) is not None:
        # There are policies with storage in its place.
        split = None
    others, left_out = [], {}
    for schedule in other_schedules(best, split, workload, machine):
        excess = memory_excess(schedule, machine)
        if excess is None:
            others.append(schedule)
        else:
            left_out[schedule.plan.policy] = excess
    excess = memory_excess(best, machine)
    if excess is not None and others:
        left_out[best.plan.policy], excess = excess, None
        best = others.pop(0)
    if split is not None and memory_excess(split, machine) is not None:
        split = None
    return PolicyChoice(best, excess, split, tuple(others), left_out)


def choose_among(policies: Sequence[str], workload: Workload, machine: Machine) -> PolicyChoice:
    """Choose the fastest of some policies: of those that the device and the host have memory for, if there are any.

    Raises:
        PolicyError: A policy does not exist or cannot plan this workload.
        MachineError: The machine lacks a rate that a policy needs.
    """
    schedules = [simulate(make_plan(policy, workload, machine), workload, machine) for policy in policies]
    excess = {schedule.plan.policy: memory_excess(schedule, machine) for schedule in schedules}
    best, *others = sorted(schedules, key=lambda schedule: (bool(excess[schedule.plan.policy]), schedule.iteration_s))
    left_out = {policy: text for policy, text in excess.items() if text is not None}
    return PolicyChoice(best, excess[best.plan.policy], None, tuple(others), left_out)


def without_offload(workload: Workload, machine: Machine) -> Schedule | None:
    """Return the schedule with all state on the device; None if it is not known to fit, or a rate is missing."""
    if workload.gpu_free is None:
        return None
    on_gpu = simulated("gpu-only", workload, machine)
    return on_gpu if on_gpu is not None and on_gpu.fits_device(machine.gpu_memory_bytes) else None


def fits_memory(schedule: Schedule, machine: Machine) -> bool:
    """Return whether device and host have memory for a schedule, as far as that is known."""
    return memory_excess(schedule, machine) is None


def memory_excess(schedule: Schedule, machine: Machine) -> str | None:
    """Return in words by how much memory is too small; None if it suffices or is not known.

    The device is too small for some jobs whatever the policy.
    """
    if schedule.workload.missing_bytes:
        return f"without any optimizer state {bytes_text(schedule.workload.missing_bytes)} of device memory are missing"
    if schedule.fits_device(machine.gpu_memory_bytes) is False:
        return f"it needs {bytes_text(schedule.peak_device_bytes)} of device memory, more than is free"
    host, available = schedule.host_bytes(), available_host_bytes(schedule.workload, machine)
    if available is not None and host > available:
        return f"it needs {bytes_text(host)} of host memory, and a rank has {bytes_text(available)}"
    pinned, limit = schedule.pinned_bytes(), machine.pinned_memory_bytes
    if limit is not None and pinned > limit:
        return f"it needs {bytes_text(pinned)} of pinned host memory, and a rank may pin {bytes_text(limit)}"
    return None
