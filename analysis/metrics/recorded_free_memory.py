"""The device memory that a recorded job leaves free over an iteration.

Also the bytes of a parameter and its state.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.windows import phase_table, recurring_segments
from ebbtide.analysis.timeseries.step_functions import FreeTimeline
from ebbtide.phases import BACKWARD, FORWARD, OTHER, UPDATE
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import OptimizerInfo, RankInfo
from ebbtide.state_bytes import PARAM_BYTES

_FP32_BYTES = 4.0
# The name of masters in the recorded state of ebbtide's optimizers.
_MASTER = "master"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class FreeStep(NamedTuple):
    """A step of the free memory over an iteration."""

    phase: str  # The phase, or `other`.
    position: float  # Begin of the step, as a share of the phase.
    # Least free memory from there to the next step, over all steady iterations.
    free_bytes: float


@once_per_trace
def free_steps(
    trace: Trace, rank: int, pool: str | None = None, capacity: int | None = None
) -> list[FreeStep] | None:
    """Return the free memory of a rank's device at each position of an iteration.

    It is the capacity (None: that of the device) less a pool (None: `free_pool`), the
    least over all steady iterations, in the order other, forward, backward, update;
    None if it is not known. Of a phase with several parts (micro-steps) the least of
    the whole counts: the parts before the last are over long before the optimizer has
    anything to move. Phases without any record are left out.
    """
    pool = pool or free_pool(trace)
    capacity = capacity_bytes(trace, rank) if capacity is None else capacity
    times, used = memory_timeline(trace, rank, pool or "")
    if capacity is None or not len(times):
        return None
    timeline = FreeTimeline(times, capacity - used)
    numbers = steady_iterations(trace).numbers
    free = capacity - phase_peaks(trace, rank, str(pool)).frame
    least = free[free.index.isin(numbers)].min()
    table = phase_table(trace, rank)
    segments = recurring_segments(table[table["iteration"].isin(numbers)])
    steps = []
    for phase in (OTHER, FORWARD, BACKWARD, UPDATE):
        in_phase = [segment for segment in segments if segment.phase == phase]
        if phase in (FORWARD, BACKWARD) and len(in_phase) == 1:
            starts, sizes = in_phase[0].least_free(timeline)
            steps += [
                FreeStep(phase, float(at), float(size))
                for at, size in zip(starts, sizes, strict=True)
            ]
        else:
            steps.append(FreeStep(phase, 0.0, float(least[phase])))
    return [step for step in steps if not np.isnan(step.free_bytes)]


def param_bytes(entry: RankInfo) -> float:
    """Return the bytes per parameter, and per gradient, of the most frequent dtype."""
    counts = entry.model.dtypes
    if not counts:
        return float(PARAM_BYTES)
    dtype = max(counts, key=lambda dtype: counts[dtype])
    return float(_DTYPE_BYTES.get(dtype.removeprefix("torch."), PARAM_BYTES))


def has_own_masters(metrics: JobMetrics) -> bool:
    """Return whether the parameters are fp32, and their own masters.

    Frameworks that offload have others.
    """
    return metrics.setup is None and param_bytes(metrics.entry) == _FP32_BYTES


def state_bytes(entry: RankInfo, own_masters: bool = False) -> float:
    """Return the bytes of state per parameter: an fp32 master weight, unless parameters
    are their own masters, and as many fp32 moments as were recorded, or two.

    The state of ebbtide's optimizers is recorded with their masters."""
    sizes = [
        (optimizer.params, _state_bytes(optimizer, own_masters))
        for optimizer in entry.optimizers
        if optimizer.params
    ]
    params = sum(count for count, _ in sizes)
    masters = 0 if own_masters else 1
    return (
        sum(count * size for count, size in sizes) / params
        if params
        else _FP32_BYTES * (2.0 + masters)
    )


def _state_bytes(optimizer: OptimizerInfo, own_masters: bool) -> float:
    if is_ebbtides(optimizer) and optimizer.state_bytes:
        masters = optimizer.state_names.get(_MASTER)
        # Older versions had masters of fp32 parameters, too.
        unused = _FP32_BYTES if own_masters and not optimizer.ebbtide else 0.0
        return optimizer.state_bytes / (optimizer.params or masters or 1) - unused
    elements = moment_elements(optimizer)
    # Without momentum torch's SGD has no state; others may have it elsewhere.
    moments = (
        round(elements / (optimizer.params or 1))
        if elements
        else 0
        if optimizer.class_name == "SGD"
        else 2
    )
    # The rule `sgd` has one in any case.
    return float(_FP32_BYTES * (max(1, moments) if own_masters else 1 + moments))


def is_ebbtides(optimizer: OptimizerInfo) -> bool:
    """Return whether optimizers are ebbtide's; old traces show it by their masters."""
    return optimizer.ebbtide or _MASTER in optimizer.state_names


def moment_elements(optimizer: OptimizerInfo) -> int:
    """Return the elements of recorded state besides masters."""
    return sum(optimizer.state_dtypes.values()) - optimizer.state_names.get(_MASTER, 0)


def torch_state_on_device(optimizers: Iterable[OptimizerInfo]) -> int:
    """Return the bytes of state of optimizers that keep it on the device.

    Ebbtide's optimizers may keep a part there.
    """
    own = [optimizer for optimizer in optimizers if not is_ebbtides(optimizer)]
    on_device = any(
        device.startswith("cuda")
        for optimizer in own
        for device in optimizer.state_devices
    )
    return sum(optimizer.state_bytes or 0 for optimizer in own) if on_device else 0


# Steps of the free memory per phase, at most.
_MAX_STEPS = 32


def recorded_free_memory(
    metrics: JobMetrics,
    phase_s: Mapping[str, float],
    pool: str | None = None,
    capacity: int | None = None,
) -> tuple[tuple[float, float], ...] | None:
    """Return (time, bytes): the free memory of the devices.

    At each point it is the least of all ranks and steady iterations; None if it is not
    known. Optimizer state that the job kept on the device counts as free: the replayed
    policy decides where it is kept. It is negative where the rest of a predicted job
    needs more than the device has. `phase_s`: lengths of other, forward and backward,
    seconds, in this order; `pool`, `capacity`: see `free_steps`.
    """
    if not metrics.has_gpu:
        return None
    recorded = _least_of_ranks(metrics.trace, pool, capacity)
    if not recorded:
        return None
    state = _state_on_device(metrics)
    steps = []
    begin = 0.0
    for phase in (OTHER, FORWARD, BACKWARD, UPDATE):
        in_phase = [
            (step.position, step.free_bytes + state)
            for step in recorded
            if step.phase == phase
        ]
        if phase_s.get(phase, 1.0):
            steps += [
                (begin + phase_s.get(phase, 0.0) * position, size)
                for position, size in with_few_steps(in_phase)
            ]
        begin += phase_s.get(phase, 0.0)
    # No memory is known to be free before the first entry.
    return ((0.0, 0.0), *steps) if steps and steps[0][0] > 0 else tuple(steps) or None


@once_per_trace
def _least_of_ranks(
    trace: Trace, pool: str | None, capacity: int | None
) -> list[FreeStep]:
    """Return the least free memory of all ranks by phase and position; empty where it
    is not known."""
    by_rank = [
        steps
        for rank in trace.ranks
        if (steps := free_steps(trace, rank, pool, capacity))
    ]
    if len(by_rank) < 2:
        return by_rank[0] if by_rank else []
    least = []
    for phase in (OTHER, FORWARD, BACKWARD, UPDATE):
        in_phase = [
            part
            for steps in by_rank
            if (part := [step for step in steps if step.phase == phase])
        ]
        for position in sorted({step.position for part in in_phase for step in part}):
            sizes = (
                next(
                    step.free_bytes
                    for step in reversed(part)
                    if step.position <= position
                )
                for part in in_phase
            )
            least.append(FreeStep(phase, position, min(sizes)))
    return least


def with_few_steps(steps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a step function on [0, 1) to a number of steps.

    Of merged neighbours, the least counts.
    """
    if len(steps) <= _MAX_STEPS:
        return steps
    positions, values = np.array(steps).T
    edges = np.linspace(0, 1, _MAX_STEPS + 1)[:-1]
    first = np.maximum(np.searchsorted(positions, edges, side="right") - 1, 0)
    after = np.append(
        np.searchsorted(positions, edges[1:], side="left"), len(positions)
    )
    return [
        (float(edge), float(values[begin : max(end, begin + 1)].min()))
        for edge, begin, end in zip(edges, first, after, strict=True)
    ]


def _state_on_device(metrics: JobMetrics) -> int:
    """Return the bytes of optimizer state that the job kept on the device.

    The device is the first rank's. Gradients that the job's framework keeps beside the
    state count, too.
    """
    if metrics.setup is not None:
        kept = metrics.setup.state_on_device(
            metrics.params or 0, state_bytes(metrics.entry)
        )
        if kept is not None:
            return kept
    return torch_state_on_device(metrics.entry.optimizers)
