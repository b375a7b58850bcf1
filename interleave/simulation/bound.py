"""Lower bounds of the iteration time of any policy, from a linear program.

The formulas are in docs/model.md.
"""

import itertools
import math
from dataclasses import dataclass, replace

from ebbtide.interleave.model.durations import alone_cpu_rate, link_rates, norm_s
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.workload import Workload, value_at
from ebbtide.interleave.simulation.bound_program import BoundProgram
from ebbtide.interleave.simulation.linear_program import (
    OVERHEAD,
    LinearProgram,
    Vector,
    cycle_intervals_of,
    intervals_of,
)
from ebbtide.interleave.simulation.whole_subgroups import WholeSubgroupProgram
from ebbtide.machines.machine import Machine
from ebbtide.phases import BACKWARD, UPDATE

_NEEDED = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
)
# Free memory below this many bytes per parameter is near the tolerance of the solver,
# 1e-7 of the state.
_MIN_FREE_BYTES_PER_PARAM = 1e-5


@dataclass(frozen=True)
class Bound:
    """Lower bounds in seconds."""

    update_s: float  # The update, if state moves within the update only.
    iteration_s: float  # The iteration, if state may move in any phase.
    exposed_s: float
    exposed_whole_s: float  # The same for plans of whole subgroups.


@dataclass(frozen=True)
class OptimalShares:
    """Shares of all parameters with which the bound `exposed_s` is reached.

    `early` and `late` are further state that is on the device when the update begins,
    and when the iteration begins.
    """

    resident: float
    early: float
    late: float
    on_cpu: float
    speculated: float
    exposed_s: float


def bound(workload: Workload, machine: Machine, overlap: Overlap = NO_OVERLAP) -> Bound:
    """Compute the bounds of a workload on a machine, also of plans with less overlap.
    Clipped steps have no use of speculation: the bound is the mean of both kinds.
    Without known free memory all memory of the device counts as free."""
    machine.need(_NEEDED, "the bound")
    if workload.layers and not workload.layer_memory:
        return _bound_with_layers(workload, machine, overlap)
    exposed, whole = (
        _mean_exposed_s(workload, machine, whole, overlap) for whole in (False, True)
    )
    return Bound(
        update_s=_min_exposed_s(
            workload, machine, windows=False, whole_subgroups=False, overlap=NO_OVERLAP
        ),
        iteration_s=workload.compute_s + exposed,
        exposed_s=exposed,
        # The rows of some other bound may be tighter.
        exposed_whole_s=max(whole, exposed),
    )


def _bound_with_layers(workload: Workload, machine: Machine, overlap: Overlap) -> Bound:
    """Return the longer of two bounds of plans that also move weights and activations.

    One is the bound of the state in all memory that layers may leave, with parameters
    that need not return to the device; the other is the bound of all bytes.
    """
    state = bound(
        replace(workload, sizes=workload.subgroups, layers=(), param_bytes=0.0),
        machine,
        overlap,
    )
    least_s = min_layer_iteration_s(workload, machine) - workload.compute_s
    exposed_s = max(state.exposed_s, least_s)
    return Bound(
        state.update_s,
        workload.compute_s + exposed_s,
        exposed_s,
        max(state.exposed_whole_s, least_s),
    )


def min_iteration_s(workload: Workload, machine: Machine, overlap: Overlap) -> float:
    """Return `Bound.iteration_s` alone: the shortest mean iteration of any plan, s."""
    machine.need(_NEEDED, "the bound")
    return workload.compute_s + _mean_exposed_s(workload, machine, False, overlap)


def optimal_shares(
    workload: Workload,
    machine: Machine,
    whole_subgroups: bool,
    overlap: Overlap = NO_OVERLAP,
) -> OptimalShares:
    """Return how the bound is reached, with or without whole subgroups, in steps that
    are not clipped."""
    machine.need(_NEEDED, "the bound")
    program, values = _solve(workload, machine, True, whole_subgroups, overlap)
    last = len(program.intervals) - 1
    state = [max(0.0, values[program.state_before(index)]) for index in range(last + 2)]
    resident = min(state)
    exposed_s = _exposed_s(workload, machine, program, values)
    if overlap.forward:
        # The intervals begin with the backward; nothing has to be on the device when an
        # iteration begins.
        update = next(
            i
            for i, interval in enumerate(program.intervals)
            if interval.phase == UPDATE
        )
        early, late = state[update] - resident, 0.0
    else:
        early, late = max(state[:-1]) - resident, state[0] - resident
    on_cpu = [
        float(values[program.variable("cpu updates", index)])
        for index in range(last + 1)
    ]
    phases = [interval.phase for interval in program.intervals]
    return OptimalShares(
        resident=resident,
        early=early,
        late=late,
        on_cpu=float(values[program.variable("total cpu updates", last)]),
        speculated=sum(
            share
            for share, phase in zip(on_cpu, phases, strict=True)
            if phase in (BACKWARD, OVERHEAD)
        ),
        exposed_s=exposed_s,
    )


def _mean_exposed_s(
    workload: Workload, machine: Machine, whole_subgroups: bool, overlap: Overlap
) -> float:
    """Return the bound of the exposed time, s, as a mean over steps.

    Some are clipped and some are not.
    """
    exposed_s = _min_exposed_s(workload, machine, True, whole_subgroups, overlap)
    if not overlap.backward:
        return exposed_s
    redone_s = _min_exposed_s(
        workload, machine, True, whole_subgroups, Overlap(overlap.forward, False)
    )
    share = workload.clip_active_share
    return (1 - share) * exposed_s + share * max(redone_s, exposed_s)


def _min_exposed_s(
    workload: Workload,
    machine: Machine,
    windows: bool,
    whole_subgroups: bool,
    overlap: Overlap,
) -> float:
    """Return the shortest update with all waits before the backward, in s.

    Its overhead is included.
    """
    exposed_s = _exposed_s(
        workload, machine, *_solve(workload, machine, windows, whole_subgroups, overlap)
    )
    if not whole_subgroups or overlap == NO_OVERLAP:
        return exposed_s
    return max(exposed_s, _first_use_s(workload, machine, overlap) - workload.other_s)


def _first_use_s(workload: Workload, machine: Machine, overlap: Overlap) -> float:
    """Return the least time from the backward to the first use of the first subgroup.

    The gradient of this subgroup comes last. The time is in s.

    The CPU gets the gradient, updates, and uploads one after another; only the update
    itself may precede clipping."""
    size = workload.subgroups[0]
    rates = link_rates(workload, machine)
    down_s, up_s = (
        workload.grad_bytes * size / rates["d2h"],
        workload.param_bytes * size / rates["h2d"],
    )
    update_s = size / alone_cpu_rate(workload, machine)
    clipped_s = 0.0
    if workload.clipping:
        clipped_s = max(machine.step_overhead_s or 0.0, down_s) + norm_s(
            workload, machine
        )
    on_cpu_s = (
        max(clipped_s, down_s + update_s)
        if overlap.backward
        else max(clipped_s, down_s) + update_s
    )
    free = max((free for _, free in workload.gpu_free or ()), default=math.inf)
    if (
        machine.gpu_update_params_per_s is None
        or size * workload.state_bytes > free * (1 + 1e-9) + 1
    ):
        return on_cpu_s + up_s
    # A kept gradient is not copied; clipping waits for the others alone.
    clipped_s = (
        (machine.step_overhead_s or 0.0) + norm_s(workload, machine)
        if workload.clipping
        else 0.0
    )
    return min(on_cpu_s + up_s, clipped_s + size / machine.gpu_update_params_per_s)


def _exposed_s(
    workload: Workload, machine: Machine, program: BoundProgram, values: Vector
) -> float:
    """Return the exposed time of a solution, s, with the overhead of the update."""
    length_s = (
        max(0.0, float(values[program.variable("exposed")])) * program.time_unit_s
    )
    return (machine.step_overhead_s or 0.0) + norm_s(workload, machine) + length_s


def _solve(
    workload: Workload,
    machine: Machine,
    windows: bool,
    whole_subgroups: bool,
    overlap: Overlap,
) -> tuple[BoundProgram, Vector]:
    """Return the program and its solution with the least exposed time.

    With `windows`, state moves outside of the update.
    """
    intervals = (cycle_intervals_of if overlap.forward else intervals_of)(
        workload, machine, overlap.backward
    )
    # The time of CPU and GPU without waiting; the solver fails where the update is very
    # much longer.
    cpu_rate, gpu_rate = (
        machine.cpu_update_rate(workload.master),
        machine.gpu_update_params_per_s,
    )
    compute_s = workload.params / ((cpu_rate or 0.0) + (gpu_rate or 0.0))
    # The solver also fails if free memory is so small that it cannot tell it from none.
    # Then it counts as none.
    min_free_bytes = _MIN_FREE_BYTES_PER_PARAM * workload.params
    rounded = [
        interval
        if interval.free_bytes >= min_free_bytes
        else replace(interval, free_bytes=0.0)
        for interval in intervals
    ]
    kind = WholeSubgroupProgram if whole_subgroups else BoundProgram
    for variant, time_unit_s in itertools.product(
        (intervals, rounded), (compute_s, 1e5 * compute_s, 1e10 * compute_s)
    ):
        program = kind(workload, machine, variant, windows, time_unit_s, overlap)
        values = program.minimize(program.variable("exposed"))
        if values is not None:
            return program, values
    raise RuntimeError("the bound's linear program has no solution")


def min_layer_iteration_s(
    workload: Workload, machine: Machine, rounds: int = 1
) -> float:
    """Return the shortest iteration of any plan that fits the device, in s.

    The iteration has `rounds` forwards, each with its backward. Weights that the device
    does not hold when the forward begins or ends cross the link once for each,
    activations that it does not hold twice. Updates are on the CPU, or with state that
    stays on the device or crosses the link.
    """
    program, compute_s = LinearProgram(), workload.compute_s
    weights = sum(workload.streamed_bytes)
    unit = (
        weights
        + sum(layer.forms[0].nbytes for layer in workload.layers)
        + workload.params
    )
    # Bytes are in this unit, times in the unit of the compute.
    length, up, down = (program.add_variable(name) for name in ("length", "up", "down"))
    at_start, at_turn = (
        program.add_variable(name, upper=weights / unit)
        for name in ("at start", "at turn")
    )
    on_cpu, resident, moved = (
        program.add_variable(name, upper=1.0) for name in ("cpu", "resident", "moved")
    )
    if machine.gpu_update_params_per_s is None:
        program.limit(resident, 0.0)
        program.limit(moved, 0.0)
    program.add_row({on_cpu: 1.0, resident: 1.0, moved: 1.0}, 1.0, 1.0)
    state, gradients = (
        width * workload.params / unit
        for width in (workload.state_bytes, workload.grad_bytes)
    )
    recomputed: dict[int, float] = {}
    in_round: dict[int, float] = {}
    crossing: dict[int, float] = {}
    for number, layer in enumerate(workload.layers):
        shares = {}
        for form_number, form in enumerate(layer.forms):
            for side in ("device", "host"):
                share = program.add_variable(f"{side} {form_number}", number, upper=1.0)
                shares[share] = 1.0
                recomputed[share] = -form.recompute_s / compute_s
                if side == "device":
                    in_round[share] = form.nbytes / unit / rounds
                else:
                    crossing[share] = -form.nbytes / unit
        program.add_row(shares, 1.0, 1.0)
    program.add_row({length: 1.0, **recomputed}, 1.0)
    missing = {at_start: rounds, at_turn: rounds}
    program.add_row(
        {up: 1.0, **missing, moved: -state, **crossing}, 2 * rounds * weights / unit
    )
    program.add_row({down: 1.0, moved: -state, on_cpu: -gradients, **crossing}, 0.0)
    free = workload.gpu_free
    if free is not None:
        free = tuple((at_s, size - workload.adapter_bytes) for at_s, size in free)
        turn_s = workload.other_s + workload.forward_s
        at_the_turn = max(value_at(free, turn_s), value_at(free, turn_s * (1 - 1e-9)))
        program.add_row(
            {at_start: 1.0, resident: state}, upper=value_at(free, 0.0) / unit
        )
        program.add_row(
            {at_turn: 1.0, resident: state, **in_round}, upper=at_the_turn / unit
        )
    traffic = workload.cpu_update_bytes * workload.params / unit
    on_gpu = workload.params / (machine.gpu_update_params_per_s or 1.0) / compute_s
    cpu_s = (
        workload.params / (machine.cpu_update_rate(workload.master) or 1.0) / compute_s
    )
    program.add_row({length: 1.0, on_cpu: -cpu_s}, 0.0)
    program.add_row({length: 1.0, resident: -on_gpu, moved: -on_gpu}, 0.0)
    rates = link_rates(workload, machine)
    for rate, terms in (
        (rates["h2d"], {up: 1.0}),
        (rates["d2h"], {down: 1.0}),
        (machine.duplex_bytes_per_s, {up: 1.0, down: 1.0}),
        (machine.host_memory_bytes_per_s, {up: 1.0, down: 1.0, on_cpu: traffic}),
    ):
        if rate:
            program.add_row(
                {
                    length: rate * compute_s / unit,
                    **{key: -value for key, value in terms.items()},
                },
                0.0,
            )
    values = program.minimize(length)
    # No plan fits: the compute alone is a bound all the same.
    return (
        compute_s if values is None else compute_s * float(values[length]) * (1 - 1e-9)
    )
