"""Lower bounds of the iteration time of any policy, from a linear program (see docs/model.md for the formulas)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ebbtide.interleave.model.durations import norm_s
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.bound_program import BoundProgram
from ebbtide.interleave.simulation.intervals import intervals_of
from ebbtide.interleave.simulation.linear_program import Vector
from ebbtide.interleave.simulation.whole_subgroups import WholeSubgroupProgram
from ebbtide.machines.machine import Machine

_NEEDED = ("h2d_bytes_per_s", "d2h_bytes_per_s", "host_memory_bytes_per_s", "cpu_update_params_per_s")
# Free memory below so many bytes per parameter is near the tolerance of the solver, 1e-7 of the state.
_MIN_FREE_BYTES_PER_PARAM = 1e-5


@dataclass(frozen=True)
class Bound:
    """Lower bounds in seconds.

    Attributes:
        update_s: The update, if state moves within the update only.
        iteration_s: The iteration, if state may move in any phase.
        exposed_s: The part of it that the optimizer adds.
        exposed_whole_s: The same for plans of whole subgroups.
    """

    update_s: float
    iteration_s: float
    exposed_s: float
    exposed_whole_s: float


@dataclass(frozen=True)
class OptimalShares:
    """Shares of all parameters with which the bound is reached.

    Attributes:
        resident: State that is always on the device.
        early: Further state that is on the device when the update begins.
        late: Further state that is on the device when the iteration begins.
        on_cpu: Parameters that the CPU updates.
        exposed_s: The bound itself: seconds that the optimizer adds to the iteration.
    """

    resident: float
    early: float
    late: float
    on_cpu: float
    exposed_s: float


def bound(workload: Workload, machine: Machine) -> Bound:
    """Compute the bounds of a workload on a machine.

    If the free memory is not known, all memory of the device counts as free: no policy is below that bound.

    Raises:
        MachineError: The machine lacks a rate.
    """
    machine.need(_NEEDED, "the bound")
    exposed = _min_update_s(workload, machine, windows=True, whole_subgroups=False)
    return Bound(
        update_s=_min_update_s(workload, machine, windows=False, whole_subgroups=False),
        iteration_s=workload.compute_s + exposed,
        exposed_s=exposed,
        exposed_whole_s=_min_update_s(workload, machine, windows=True, whole_subgroups=True),
    )


def optimal_shares(workload: Workload, machine: Machine, whole_subgroups: bool) -> OptimalShares:
    """Return how the bound is reached, with or without whole subgroups.

    Raises:
        MachineError: The machine lacks a rate.
    """
    machine.need(_NEEDED, "the bound")
    program, values = _solve(workload, machine, windows=True, whole_subgroups=whole_subgroups)
    last = len(program.intervals) - 1
    state = [max(0.0, values[program.state_before(index)]) for index in range(last + 2)]
    resident = min(state)
    return OptimalShares(
        resident=resident,
        early=max(state[:-1]) - resident,
        late=state[0] - resident,
        on_cpu=float(values[program.variable("total cpu updates", last)]),
        exposed_s=_update_s(workload, machine, program, values),
    )


def _min_update_s(workload: Workload, machine: Machine, windows: bool, whole_subgroups: bool) -> float:
    """Return the shortest update, s, its overhead included."""
    return _update_s(workload, machine, *_solve(workload, machine, windows, whole_subgroups))


def _update_s(workload: Workload, machine: Machine, program: BoundProgram, values: Vector) -> float:
    """Return the length of the update in a solution, s, its overhead included."""
    length_s = max(0.0, float(values[program.variable("update length")])) * program.time_unit_s
    return (machine.step_overhead_s or 0.0) + norm_s(workload, machine) + length_s


def _solve(workload: Workload, machine: Machine, windows: bool, whole_subgroups: bool) -> tuple[BoundProgram, Vector]:
    """Return the program and the values of its variables where the update is shortest.

    Args:
        workload: The workload.
        machine: The machine.
        windows: Whether state may move outside of the update.
        whole_subgroups: Whether plans consist of whole subgroups.
    """
    intervals = intervals_of(workload, machine)
    # The time that CPU and GPU need together without any waiting. With extremely different rates the update is so much
    # longer than this that the solver fails; the time unit then has to be longer.
    compute_s = workload.params / ((machine.cpu_update_params_per_s or 0.0) + (machine.gpu_update_params_per_s or 0.0))
    # The solver also fails if free memory is so small that it cannot tell it from none. Then it counts as none.
    min_free_bytes = _MIN_FREE_BYTES_PER_PARAM * workload.params
    rounded = [
        interval if interval.free_bytes >= min_free_bytes else replace(interval, free_bytes=0.0)
        for interval in intervals
    ]
    kind = WholeSubgroupProgram if whole_subgroups else BoundProgram
    for variant, time_unit_s in itertools.product((intervals, rounded), (compute_s, 1e5 * compute_s, 1e10 * compute_s)):
        program = kind(workload, machine, variant, windows, time_unit_s)
        values = program.minimize(program.variable("update length"))
        if values is not None:
            return program, values
    raise RuntimeError("the bound's linear program has no solution")
