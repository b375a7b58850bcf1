"""The memory of a job: taken apart from a trace, and what it leaves free on a machine
with other settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ebbtide.analysis.metrics.devices import capacity_bytes, memory_timeline
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.recorded_free_memory import recorded_free_memory
from ebbtide.features.advise.job.compute_times import GATHERED_LAYERS
from ebbtide.features.advise.job.decoder import checkpointed_share, guessed_layers
from ebbtide.features.advise.job.trace_layers import with_trace_layers
from ebbtide.features.advise.job.training_job import (
    ComputeTimes,
    MemoryPoint,
    OwnMemory,
    TrainingJob,
    TunableSettings,
)
from ebbtide.interleave.model.workload import FreeMemorySteps, Workload, value_at
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, FORWARD, OTHER
from ebbtide.profiler.trace import Trace

# The point of the iteration where the update begins.
_UPDATE_POINT = 3.0
# What torch keeps at least beyond its tensors (docs/plan.md).
_CACHED_SHARE = 0.05
# Pools of what tensors take, without what torch keeps for others; the first one
# recorded counts.
_TENSOR_POOLS = ("requested", "allocated")


class PlacedWorkload(NamedTuple):
    """A workload on a machine. Its free memory is never negative."""

    workload: Workload
    times: ComputeTimes


def place(
    job: TrainingJob, settings: TunableSettings, machine: Machine
) -> PlacedWorkload:
    """Return the workload of a rank on a machine with its rates. Raises MachineError if
    the GPU lacks a rate."""
    micro_steps = job.micro_steps_of(settings)
    times = job.compute.times(machine, settings, micro_steps)
    base = job.workload
    share = job.settings.ranks / settings.ranks
    params = -(-base.params * job.settings.ranks // settings.ranks)
    stay = base.gradients_held_until_step and not streams_gradients(job, settings)
    state = (
        job.state_bytes
        if job.state_bytes is not None and not settings.offload
        else base.state_bytes
    )
    workload = replace(
        base,
        params=params,
        subgroup_params=min(base.subgroup_params, params),
        sizes=base.sizes if share == 1 else None,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        other_s=times.other_s,
        state_bytes=state,
        gradients_held_until_step=stay or micro_steps > job.micro_steps,
    )
    free, missing = _free_memory(job, settings, machine, workload, share)
    return PlacedWorkload(
        replace(workload, gpu_free=free, missing_bytes=missing), times
    )


def streams_gradients(job: TrainingJob, settings: TunableSettings) -> bool:
    """Return whether gradients go to the host as they are computed with some settings:
    where there is one micro-step."""
    return (
        settings.offload
        and not job.settings.offload
        and job.micro_steps_of(settings) == 1
    )


def own_bytes(
    memory: OwnMemory,
    job: TrainingJob,
    settings: TunableSettings,
    share: float,
    grad_bytes: float,
) -> list[tuple[float, float]]:
    """Return (point, bytes) of the job's own device memory with some settings; `share`:
    of the parameters that the rank had; `grad_bytes`: of gradients that stay on the
    device since micro-steps were added."""
    batch = 1.0
    if settings.micro_batch is not None and job.settings.micro_batch is not None:
        batch = settings.micro_batch / job.settings.micro_batch
    if (
        settings.checkpointing
        and not job.settings.checkpointing
        and memory.checkpointed is not None
    ):
        batch *= memory.checkpointed
    gathered = (
        min(memory.gather_bytes, memory.param_bytes * (1 - share)) if share < 1 else 0.0
    )
    constant = memory.fixed_bytes + memory.param_bytes * share + gathered
    own_points = memory.tensors or memory.points
    all_gradients = max(at.gradient_bytes for at in own_points)
    left = 0.0 if streams_gradients(job, settings) else memory.gradient_share

    def used() -> list[tuple[float, float]]:
        sizes = []
        for at in own_points:
            # Temporaries of an update do not depend on the batch: as large as its
            # gradients, at most.
            kept = (
                min(at.activation_bytes, all_gradients)
                if at.point >= _UPDATE_POINT
                else 0.0
            )
            gradients = max(at.gradient_bytes * share * left, grad_bytes)
            sizes.append(
                (
                    gradients + kept * left + (at.activation_bytes - kept) * batch,
                    gradients,
                )
            )
        return sizes

    numbers = [at.point for at in memory.points]
    if not memory.tensors:
        return [*zip(numbers, (constant + size for size, _ in used()), strict=True)]
    kept = [constant + at.gradient_bytes + at.activation_bytes for at in memory.points]
    before, at_peak = max(
        (at.gradient_bytes + at.activation_bytes, at.gradient_bytes)
        for at in memory.tensors
    )
    after, still_at_peak = max(used())
    # Gradients that are not on the device at the peak of tensors are in memory that
    # torch keeps.
    later = max(all_gradients * share * left, grad_bytes) - still_at_peak
    fewer, cached = max(0.0, all_gradients - at_peak - later), memory.cached_bytes
    most = max(kept) - cached + after - before
    most += max(
        cached - fewer,
        min(later, cached + before - after),
        min(cached, _CACHED_SHARE * most),
    )
    return [
        *zip(
            numbers,
            (min(size + max(0.0, most - max(kept)), most) for size in kept),
            strict=True,
        )
    ]


def _free_memory(
    job: TrainingJob,
    settings: TunableSettings,
    machine: Machine,
    workload: Workload,
    share: float,
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
        steps = [
            (_point(at_s, lengths), min(size + shared_bytes, limit))
            for at_s, size in free
        ]
        return _by_time(steps, workload), workload.missing_bytes
    if capacity is None:
        return None, 0.0
    added = job.micro_steps_of(settings) > job.micro_steps
    gradients = workload.grad_bytes * workload.params if added else 0.0
    used = own_bytes(job.memory, job, settings, share, gradients)
    missing = max(
        0.0, max(size for _, size in used) - capacity + workload.gpu_slack_bytes
    )
    left = [
        (point, max(0.0, capacity - size - workload.gpu_slack_bytes))
        for point, size in used
    ]
    return _by_time(left, workload), missing


def _by_time(steps: list[tuple[float, float]], workload: Workload) -> FreeMemorySteps:
    """Convert points of the iteration to seconds. Of points at one time, in a phase of
    no length, the least counts."""
    lengths = workload.other_s, workload.forward_s, workload.backward_s
    by_time: dict[float, float] = {}
    for point, size in steps:
        at_s = sum(
            length * min(max(point - number, 0.0), 1.0)
            for number, length in enumerate(lengths)
        )
        by_time[at_s] = (
            min(size, by_time.get(at_s, size)) if point < len(lengths) else size
        )
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


def points_of(
    free: FreeMemorySteps, lengths: tuple[float, float, float], capacity: float
) -> list[tuple[float, float]]:
    """Return (point, bytes in use) of a step function of free memory, at its own steps
    and at the bounds of phases."""
    ends = (0.0, lengths[0], lengths[0] + lengths[1], sum(lengths))
    times = sorted({at_s for at_s, _ in free} | set(ends))
    return [(_point(at_s, lengths), capacity - value_at(free, at_s)) for at_s in times]


def recorded_memory(
    trace: Trace, workload: Workload, gradients_held: bool
) -> OwnMemory | None:
    """Return the memory of a job beside its optimizer state; None where it is not
    known. Fixed is what every moment of the iteration has, but for parameters.
    Gradients held until the step count from the backward, as they are computed, to the
    update, or all the time if there are several micro-steps; all else counts as
    activations."""
    metrics = JobMetrics(trace)
    capacity = capacity_bytes(trace, trace.ranks[0])
    if workload.gpu_free is None or capacity is None:
        return None
    lengths = workload.other_s, workload.forward_s, workload.backward_s
    phase_s = dict(zip((OTHER, FORWARD, BACKWARD), lengths, strict=True))
    # Not `gpu_free`, which is 0 where a predicted job needs more than the device has.
    used = points_of(
        recorded_free_memory(metrics, phase_s) or (), lengths, float(capacity)
    )
    least = min(size for _, size in used)
    model = metrics.entry.model
    params = (
        float(model.bytes)
        if model.bytes is not None
        else workload.param_bytes * workload.params
    )
    params = min(params, max(least, 0.0))
    all_gradients = workload.grad_bytes * workload.params if gradients_held else 0.0
    lasting = (
        min(all_gradients, max(least - params, 0.0)) if workload.accumulates else 0.0
    )
    pool = next(
        (
            pool
            for pool in _TENSOR_POOLS
            if memory_timeline(trace, trace.ranks[0], pool)[0].size
        ),
        None,
    )
    free = recorded_free_memory(metrics, phase_s, pool) if pool is not None else None
    of_tensors = points_of(free, lengths, float(capacity)) if free else []
    total = model.total_params or workload.params
    several = (metrics.entry.world_size or len(trace.ranks)) > 1
    memory = OwnMemory(
        fixed_bytes=least - params - lasting,
        param_bytes=params,
        gather_bytes=0.0
        if several
        else GATHERED_LAYERS * workload.param_bytes * total / guessed_layers(total),
        points=_memory_points(used, all_gradients, lasting),
        tensors=_memory_points(of_tensors, all_gradients, lasting)
        if of_tensors
        else (),
        cached_bytes=max(size for _, size in used)
        - max((size for _, size in of_tensors), default=0.0),
        checkpointed=checkpointed_share(total),
        capacity_bytes=float(capacity) if trace.meta.machine is None else None,
    )
    layers = () if metrics.checkpointing else with_trace_layers(workload, trace).layers
    if layers:
        # Layers keep their inputs, and one at a time all; logits and the like stay.
        most = max(at.activation_bytes for at in memory.tensors or memory.points)
        whole, inputs = (
            [layer.forms[form].nbytes for layer in layers] for form in (0, 1)
        )
        memory = replace(
            memory,
            checkpointed=max(0.0, 1 - (sum(whole) - sum(inputs) - max(whole)) / most),
        )
    return memory


def _memory_points(
    used: Sequence[tuple[float, float]], total: float, lasting: float
) -> tuple[MemoryPoint, ...]:
    """Return gradients and activations of what is used beyond the least of all moments;
    of a total of gradients some may be `lasting`. What is between the phases, at first,
    has the gradients between backward and update."""
    least = min(size for _, size in used) - lasting
    points = []
    for point, size in used:
        computed = total * (1.0 if point < 1 else min(max(point - 2, 0.0), 1.0))
        gradients = min(max(computed, lasting), size - least)
        points.append(MemoryPoint(point, gradients, size - least - gradients))
    return tuple(points)
