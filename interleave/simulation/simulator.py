"""The simulator: runs a plan in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np

from ebbtide import seams
from ebbtide.interleave.model.durations import (
    Durations,
    host_traffic,
    link_shares,
    phase_before,
)
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule, exceeds_host
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.fluid import INFINITE
from ebbtide.interleave.simulation.iterations import (
    is_exact,
    run_cycle,
    run_iterations,
    run_once,
)
from ebbtide.interleave.simulation.lanes import Lanes
from ebbtide.interleave.simulation.tasks import IterationWork, Work
from ebbtide.machines.catalog import MachineArgument, find_machine
from ebbtide.machines.machine import Machine

# What the duration of an operation depends on, beside the plan's share of the CPU's
# rate and where it updates state.
_cost_fields = attrgetter("kind", "resource", "params", "nbytes", "pageable", "tag")
_OpClass = tuple[tuple[Any, ...], float, bool]


def simulate(plan: Plan, workload: Workload, machine: MachineArgument) -> Schedule:
    """Run a plan on a machine, its file or its name. The same input gives the same
    output to the bit.

    Each lane runs the first operation of the plan that is ready, one at a time.
    Operations that run at the same time share bandwidth as a fluid (see `lanes.Lanes`):
    both directions of the link the duplex limit, CPU updates and copies the bandwidth
    of host memory.

    Raises:
        MachineError: There is no such machine, or it lacks a rate that the plan needs.
        PlanError: Operations wait for each other.
    """
    placed = workload if plan.layers is None else plan.layers.place(workload)
    schedule = Simulator(placed, find_machine(machine)).run(plan)
    assert schedule is not None
    return schedule


class Simulator:
    """Runs plans of one workload on one machine, see `simulate`."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine
        self._overhead_s = (
            0.0 if workload.own_update_s else machine.step_overhead_s or 0.0
        )
        self._lanes = Lanes(machine)
        self._stops_compute = self._lanes.mode({"compute": 0.0})
        # Modes of the job's collectives, which run while compute does.
        self._modes = {
            phase: self._lanes.mode({"h2d": up, "d2h": down})
            for phase, (up, down) in link_shares(workload, machine).items()
        }
        # Lane, seconds and bytes/s of host memory traffic of each class of operations
        # that has occurred.
        self._work: dict[_OpClass, tuple[int, float, float]] = {}
        # Points of the iteration, and the seconds of compute until each of them, of the
        # plan before.
        self._points: list[float] = []
        self._compute_s: list[float] = []

    def run(self, plan: Plan, limit_s: float = INFINITE) -> Schedule | None:
        """Run a plan; None if it was given up since it takes longer than the limit.
        Iterations that depend on the ones before are repeated until they are equal."""
        work = self.iteration_work(plan)
        if not plan.has_late_operations:
            return run_once(work, limit_s)
        return run_cycle(work, limit_s) if is_exact(plan) else run_iterations(work)

    def iteration_work(self, plan: Plan) -> IterationWork:
        """Return the tasks of an iteration under a plan."""
        holds = {op.holds for op in plan.ops if op.holds is not None}
        starts = (
            {BACKWARD}
            | {op.start for op in plan.ops}
            | {hold.point for hold in holds if not hold.is_next}
        )
        due = {hold.point for hold in holds if hold.is_next}
        if due:
            due.add(BACKWARD)
        occurring = starts | due | {FORWARD, UPDATE}
        points = sorted(
            [*(point for point in occurring if 0.0 < point <= UPDATE), *(starts & due)]
        )
        if points != self._points:
            self._points, self._compute_s = (
                points,
                _compute_lengths(self._workload, points),
            )
        return IterationWork(
            plan, self._workload, points, self._work_of(plan, points), self._lanes
        )

    def _work_of(self, plan: Plan, points: list[float]) -> Work:
        """Return the work of an iteration: of its start, of compute until each point,
        of the overhead, and of the operations."""
        entries = [*self._entries(plan)]
        lanes, alone_s, demand = ([*column] for column in zip(*entries, strict=True))
        before = len(points) + 2
        mode = np.zeros(before + len(entries), int)
        if self._modes:
            mode[1 : 1 + len(points)] = [
                self._modes.get(phase_before(point), 0) for point in points
            ]
        if plan.has_late_operations:
            late = [op.is_late and op.resource == "gpu" for op in plan.ops]
            mode[before:][late] = self._stops_compute
        return Work(
            lane=np.array([self._lanes.index["compute"]] * before + lanes),
            alone_s=np.array([0.0, *self._compute_s, self._overhead_s, *alone_s]),
            demand=np.array([0.0] * before + demand),
            mode=mode,
        )

    def _entries(self, plan: Plan) -> list[tuple[int, float, float]]:
        """Return lane, seconds alone, and host memory bytes/s of each operation."""
        work = self._work
        classes: list[_OpClass] = [
            (_cost_fields(op), plan.cpu_share, plan.rolls_back) for op in plan.ops
        ]
        try:
            return [work[op_class] for op_class in classes]
        except KeyError:
            durations = Durations(plan, self._workload, self._machine)
            for op_class, op in zip(classes, plan.ops, strict=True):
                seconds, traffic = (
                    durations.seconds(op),
                    host_traffic(op, self._workload),
                )
                work[op_class] = (
                    self._lanes.index[op.resource],
                    seconds,
                    traffic / seconds if seconds > 0.0 else 0.0,
                )
            return [work[op_class] for op_class in classes]


def _compute_lengths(workload: Workload, points: list[float]) -> list[float]:
    """Return the seconds of compute until each point of the iteration, from the point
    before it."""
    lengths = []
    previous = 0.0
    for point in points:
        in_forward, in_backward = (
            min(max(point - FORWARD, 0.0), 1.0),
            max(point - BACKWARD, 0.0),
        )
        until = (
            workload.other_s * min(point, 1.0)
            + workload.forward_s * in_forward
            + workload.backward_s * in_backward
        )
        lengths.append(until - previous)
        previous = until
    return lengths


@dataclass(frozen=True)
class Steps:
    """Schedules of the two kinds of steps."""

    valid: Schedule  # The schedule of a step that clipping does not change.
    # The schedule of one that it changes; None if the plan does not speculate.
    redone: Schedule | None = None

    @property
    def plan(self) -> Plan:
        return self.valid.plan

    @property
    def iteration_s(self) -> float:
        """The mean iteration, s."""
        return self.mean("iteration_s")

    @property
    def rating_s(self) -> float:
        """The mean of `Schedule.rating_s`."""
        return self.mean("rating_s")

    @property
    def settles(self) -> bool:
        """Whether the iterations of both schedules repeat, see `Schedule.settles`."""
        return self.valid.settles and (self.redone is None or self.redone.settles)

    @property
    def note(self) -> str | None:
        """The note of the schedules, see `Schedule.note`."""
        return self.valid.note or (
            self.redone.note if self.redone is not None else None
        )

    def cost(self, machine: Machine) -> tuple[bool, bool, float]:
        """Return whether the plan exceeds memory of the device, and of the host, and
        its rating, s."""
        exceeds = exceeds_host(self.plan, self.valid.workload, machine)
        return self.valid.fits_device(None) is False, exceeds, self.rating_s

    def mean(self, key: str) -> float:
        """Return the mean of an attribute of the schedules, weighted by
        `Workload.clip_active_share`."""
        value: float = getattr(self.valid, key)
        if self.redone is None:
            return value
        share = self.valid.workload.clip_active_share
        return (1 - share) * value + share * float(getattr(self.redone, key))


def simulate_steps(plan: Plan, workload: Workload, machine: Machine) -> Steps:
    """Run a plan on a machine in a step that clipping changes and in one that it does
    not (see `simulate`)."""
    valid = simulate(plan, workload, machine)
    return Steps(
        valid,
        simulate(plan_of_clipped_step(plan), workload, machine)
        if plan.speculated
        else None,
    )


def plan_of_clipped_step(plan: Plan) -> Plan:
    """Return the plan of a step in which clipping changes what was speculated."""
    return _redone_plan()(plan)


@cache
def _redone_plan() -> Callable[[Plan], Plan]:
    """Return the service, which searches ask for with many plans."""
    redone: Callable[[Plan], Plan] = seams.service("redone-plan")
    return redone
