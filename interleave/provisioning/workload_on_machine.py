"""The workload of a job with some settings on a machine: its times there, and the memory that it leaves free."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ebbtide.interleave.model.workload import FreeMemorySteps, Workload, value_at
from ebbtide.interleave.provisioning.training_job import ComputeTimes, OwnMemory, TrainingJob, TunableSettings
from ebbtide.machines.machine import Machine


class PlacedWorkload(NamedTuple):
    """A workload on a machine.

    Attributes:
        workload: The workload; its free memory is never negative.
        times: Its times and their uncertainty.
    """

    workload: Workload
    times: ComputeTimes


def place(job: TrainingJob, settings: TunableSettings, machine: Machine) -> PlacedWorkload:
    """Return the workload of one rank with some settings on a machine.

    Args:
        job: The job.
        settings: The settings.
        machine: The machine, with the rates for the ranks that share a host.

    Raises:
        MachineError: The machine does not state a rate of its GPU that is needed.
    """
    micro_steps = job.micro_steps_of(settings)
    times = job.compute.times(machine, settings, micro_steps)
    base = job.workload
    share = job.settings.ranks / settings.ranks
    params = -(-base.params * job.settings.ranks // settings.ranks)
    accumulates = micro_steps > job.micro_steps or base.gradients_held_until_step
    state = job.state_bytes if job.state_bytes is not None and not settings.offload else base.state_bytes
    workload = replace(
        base,
        params=params,
        subgroup_params=min(base.subgroup_params, params),
        sizes=base.sizes if share == 1 else None,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        other_s=times.other_s,
        state_bytes=state,
        gradients_held_until_step=accumulates,
    )
    free, missing = _free_memory(job, settings, machine, workload, share)
    return PlacedWorkload(replace(workload, gpu_free=free, missing_bytes=missing), times)


def own_bytes(
    memory: OwnMemory, job: TrainingJob, settings: TunableSettings, share: float, grad_bytes: float
) -> list[tuple[float, float]]:
    """Return (point, bytes) of the job's own device memory with some settings.

    Args:
        memory: Its memory with its own settings.
        job: The job.
        settings: The settings.
        share: A rank's share of the parameters, as a share of what it had.
        grad_bytes: Bytes of gradients that stay on the device for all of the iteration, since micro-steps were added.
    """
    batch = 1.0
    if settings.micro_batch is not None and job.settings.micro_batch is not None:
        batch = settings.micro_batch / job.settings.micro_batch
    if settings.checkpointing and not job.settings.checkpointing and memory.checkpointed is not None:
        batch *= memory.checkpointed
    gathered = min(memory.gather_bytes, memory.param_bytes * (1 - share)) if share < 1 else 0.0
    constant = memory.fixed_bytes + memory.param_bytes * share + gathered
    return [
        (point, constant + max(gradient * share, grad_bytes) + activation * batch)
        for point, gradient, activation in ((at.point, at.gradient_bytes, at.activation_bytes) for at in memory.points)
    ]


def _free_memory(
    job: TrainingJob, settings: TunableSettings, machine: Machine, workload: Workload, share: float
) -> tuple[FreeMemorySteps | None, float]:
    capacity = machine.gpu_memory_bytes
    if job.memory is None:
        free = job.workload.gpu_free
        if free is None:
            return None, workload.missing_bytes
        lengths = job.workload.other_s, job.workload.forward_s, job.workload.backward_s
        # More ranks share the parameters too.
        shared_bytes = max(0.0, 1 - share) * workload.param_bytes * job.workload.params
        limit = capacity if capacity is not None else float("inf")
        steps = [(_point(at_s, lengths), min(size + shared_bytes, limit)) for at_s, size in free]
        return _by_time(steps, workload), workload.missing_bytes
    if capacity is None:
        return None, 0.0
    added = job.micro_steps_of(settings) > job.micro_steps
    gradients = workload.grad_bytes * workload.params if added else 0.0
    used = own_bytes(job.memory, job, settings, share, gradients)
    missing = max(0.0, max(size for _, size in used) - capacity + workload.gpu_slack_bytes)
    left = [(point, max(0.0, capacity - size - workload.gpu_slack_bytes)) for point, size in used]
    return _by_time(left, workload), missing


def _by_time(steps: list[tuple[float, float]], workload: Workload) -> FreeMemorySteps:
    """Convert points of the iteration to seconds. Of points at one time, in a phase of no length, the least counts."""
    lengths = workload.other_s, workload.forward_s, workload.backward_s
    by_time: dict[float, float] = {}
    for point, size in steps:
        at_s = sum(length * min(max(point - number, 0.0), 1.0) for number, length in enumerate(lengths))
        by_time[at_s] = min(size, by_time.get(at_s, size)) if point < len(lengths) else size
    return tuple(sorted(by_time.items()))


def _point(at_s: float, lengths: tuple[float, ...]) -> float:
    """Return the point of the iteration at a time."""
    point = 0.0
    for length in lengths:
        if at_s < length:
            return point + at_s / length
        at_s -= length
        point += 1
    return point


def points_of(free: FreeMemorySteps, lengths: tuple[float, float, float], capacity: float) -> list[tuple[float, float]]:
    """Return (point, bytes in use) of a step function of free memory, at its own steps and at the bounds of phases."""
    ends = (0.0, lengths[0], lengths[0] + lengths[1], sum(lengths))
    times = sorted({at_s for at_s, _ in free} | set(ends))
    return [(_point(at_s, lengths), capacity - value_at(free, at_s)) for at_s in times]
