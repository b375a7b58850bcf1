"""The memory of a job: taken apart from a trace, and what it leaves free on a machine
with other settings."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ebbtide.analysis.metrics.devices import capacity_bytes, memory_timeline, pool_peaks
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
    Variant,
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
    one, base = Variant(job, settings), job.workload
    times = job.compute.times(machine, settings, one.micro_steps)
    stay = base.gradients_held_until_step and not one.streams_gradients
    own_state = None if settings.offload else job.state_bytes
    workload = replace(
        base,
        params=one.params,
        subgroup_params=min(base.subgroup_params, one.params),
        sizes=base.sizes if one.share == 1 else None,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        other_s=times.other_s,
        state_bytes=base.state_bytes if own_state is None else own_state,
        gradients_held_until_step=stay or one.adds_micro_steps,
    )
    free, missing = _free_memory(one, workload, machine.gpu_memory_bytes)
    return PlacedWorkload(
        replace(workload, gpu_free=free, missing_bytes=missing), times
    )


def own_bytes(one: Variant) -> list[tuple[float, float]]:
    """Return (point, bytes) of the job's own device memory, which has to be known."""
    memory, share, batch = one.job.memory, one.share, 1.0
    own, settings = one.job.settings, one.settings
    assert memory is not None
    if settings.micro_batch is not None and own.micro_batch is not None:
        batch = settings.micro_batch / own.micro_batch
    is_new = settings.checkpointing and not own.checkpointing
    if is_new and memory.checkpointed is not None:
        batch *= memory.checkpointed
    constant = memory.fixed_bytes + memory.param_bytes * share
    if share < 1:
        constant += min(memory.gather_bytes, memory.param_bytes * (1 - share))
    own_points = memory.tensors or memory.points
    all_gradients = max(at.gradient_bytes for at in own_points)
    left = 0.0 if one.streams_gradients else memory.gradient_share
    # Gradients that stay on the device since micro-steps were added.
    added = one.gradient_bytes if one.adds_micro_steps else 0.0
    used = []
    for at in own_points:
        # Temporaries of an update do not depend on the batch: as large as its
        # gradients, at most.
        is_update = at.point >= _UPDATE_POINT
        kept = min(at.activation_bytes, all_gradients) if is_update else 0.0
        gradients = max(at.gradient_bytes * share * left, added)
        varying = (at.activation_bytes - kept) * batch
        used.append((gradients + kept * left + varying, gradients))
    if not memory.tensors:
        return [
            (at.point, constant + size)
            for at, (size, _) in zip(own_points, used, strict=True)
        ]
    before, at_peak = max(
        (at.gradient_bytes + at.activation_bytes, at.gradient_bytes)
        for at in memory.tensors
    )
    after, still_at_peak = max(used)
    # Gradients that are not on the device at the peak of tensors are in memory that
    # torch keeps.
    later = max(all_gradients * share * left, added) - still_at_peak
    fewer, cached = max(0.0, all_gradients - at_peak - later), memory.cached_bytes
    kept_bytes = [
        (at.point, constant + at.gradient_bytes + at.activation_bytes)
        for at in memory.points
    ]
    most = most_bytes(kept_bytes) - cached + after - before
    most += max(
        cached - fewer,
        min(later, cached + before - after),
        min(cached, _CACHED_SHARE * most),
    )
    growth = max(0.0, most - most_bytes(kept_bytes))
    return [(point, min(size + growth, most)) for point, size in kept_bytes]


def most_bytes(steps: list[tuple[float, float]]) -> float:
    """Return the most bytes of any point; 0 without points."""
    return max((size for _, size in steps), default=0.0)


def _free_memory(
    one: Variant, workload: Workload, capacity: float | None
) -> tuple[FreeMemorySteps | None, float]:
    """Return the free memory of a placed workload, and what is missing."""
    base, slack = one.job.workload, workload.gpu_slack_bytes
    if one.job.memory is None:
        if base.gpu_free is None:
            return None, base.missing_bytes
        # More ranks share the parameters too.
        shared_bytes = max(0.0, 1 - one.share) * base.param_bytes * base.params
        limit = capacity if capacity is not None else inf
        steps = [
            (_point(at_s, _lengths(base)), min(size + shared_bytes, limit))
            for at_s, size in base.gpu_free
        ]
        return _by_time(steps, workload), base.missing_bytes
    if capacity is None:
        return None, 0.0
    used = own_bytes(one)
    missing = max(0.0, most_bytes(used) - capacity + slack)
    left = [(point, max(0.0, capacity - size - slack)) for point, size in used]
    return _by_time(left, workload), missing


def _lengths(workload: Workload) -> tuple[float, float, float]:
    """Return the times of what is outside of the phases, forward and backward."""
    return workload.other_s, workload.forward_s, workload.backward_s


def passed(point: float, phase: int) -> float:
    """Return the share of a phase, by its number, that has passed at a point."""
    return min(max(point - phase, 0.0), 1.0)


def _by_time(steps: list[tuple[float, float]], workload: Workload) -> FreeMemorySteps:
    """Convert points of the iteration to seconds. Of points at one time, in a phase of
    no length, the least counts."""
    by_time: dict[float, float] = {}
    for point, size in steps:
        at_s = sum(
            length * passed(point, number)
            for number, length in enumerate(_lengths(workload))
        )
        least = min(size, by_time.get(at_s, size))
        by_time[at_s] = least if point < _UPDATE_POINT else size
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
    ends = (0.0, *accumulate(lengths))
    times = sorted({at_s for at_s, _ in free} | set(ends))
    return [(_point(at_s, lengths), capacity - value_at(free, at_s)) for at_s in times]


def recorded_memory(trace: Trace, workload: Workload) -> OwnMemory | None:
    """Return the memory of a job beside its optimizer state; None where it is not
    known. Fixed is what every moment of the iteration has, but for parameters.
    Gradients held until the step count from the backward, as they are computed, to the
    update, or all the time if there are several micro-steps; all else counts as
    activations."""
    metrics, rank = JobMetrics(trace), trace.ranks[0]
    pool, capacity = metrics.free_pool, capacity_bytes(trace, rank)
    if not metrics.has_gpu or pool is None:
        return None
    # Without a capacity, what is free of the most that is used tells what is used.
    limit = capacity or max(
        pool_peaks(trace, number).get(pool, 0) for number in trace.ranks
    )
    lengths = _lengths(workload)
    phase_s = dict(zip((OTHER, FORWARD, BACKWARD), lengths, strict=True))

    def used_bytes(pool: str | None) -> list[tuple[float, float]]:
        # Not `gpu_free`, which is 0 where a predicted job needs more than the device
        # has.
        free = recorded_free_memory(metrics, phase_s, pool, limit)
        return points_of(free, lengths, float(limit)) if free else []

    used, of_tensors = used_bytes(None), []
    if not used:
        return None
    for pool in _TENSOR_POOLS:
        if memory_timeline(trace, rank, pool)[0].size:
            of_tensors = used_bytes(pool)
            break
    least = min(size for _, size in used)
    model = metrics.entry.model
    own = workload.param_bytes * workload.params if model.bytes is None else model.bytes
    params = min(float(own), max(least, 0.0))
    gradients = 0.0
    if workload.gradients_held_until_step:
        gradients = workload.grad_bytes * workload.params
    lasting = min(gradients, max(least - params, 0.0)) if workload.accumulates else 0.0
    total = model.total_params or workload.params
    several = (metrics.entry.world_size or len(trace.ranks)) > 1
    gathered = GATHERED_LAYERS * workload.param_bytes * total / guessed_layers(total)
    points, tensors = (
        _memory_points(steps, gradients, lasting) for steps in (used, of_tensors)
    )
    checkpointed = checkpointed_share(total)
    layers = () if metrics.checkpointing else with_trace_layers(workload, trace).layers
    if layers:
        # Layers keep their inputs, and one at a time all; logits and the like stay.
        most = max(at.activation_bytes for at in tensors or points)
        whole, inputs = (
            [layer.forms[form].nbytes for layer in layers] for form in (0, 1)
        )
        released = sum(whole) - sum(inputs) - max(whole)
        checkpointed = max(0.0, 1 - released / most)
    return OwnMemory(
        fixed_bytes=least - params - lasting,
        param_bytes=params,
        gather_bytes=0.0 if several else gathered,
        points=points,
        tensors=tensors,
        cached_bytes=most_bytes(used) - most_bytes(of_tensors),
        checkpointed=checkpointed,
        capacity_bytes=capacity if trace.meta.machine is None else None,
    )


def _memory_points(
    used: Sequence[tuple[float, float]], total: float, lasting: float
) -> tuple[MemoryPoint, ...]:
    """Return gradients and activations of what is used beyond the least of all moments;
    of a total of gradients some may be `lasting`. What is between the phases, at first,
    has the gradients between backward and update."""
    least = min((size for _, size in used), default=0.0) - lasting
    points = []
    for point, size in used:
        computed = total * (1.0 if point < 1 else passed(point, 2))
        gradients = min(max(computed, lasting), size - least)
        points.append(MemoryPoint(point, gradients, size - least - gradients))
    return tuple(points)
