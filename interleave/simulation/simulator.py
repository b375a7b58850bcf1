"""The simulator: runs a plan in virtual time."""

from dataclasses import dataclass

from ebbtide.errors import PlanError
from ebbtide.interleave.model.durations import Durations, host_traffic, link_shares, phase_before
from ebbtide.interleave.model.layers import place
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, OpKind, Plan, Resource
from ebbtide.interleave.model.schedule import Schedule, available_host_bytes
from ebbtide.interleave.model.speculation import redone
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.event_loop import (
    COMPUTE,
    CPU,
    D2H,
    GPU,
    H2D,
    INFINITE,
    STORAGE,
    TaskGraph,
    run_tasks,
)
from ebbtide.interleave.simulation.iterations import IterationWork, late_gpu_operations, run_iterations
from ebbtide.machines.machine import Machine

# Reads and writes of the first path of the storage; those of the next path follow.
_INDEX = {"cpu": CPU, "gpu": GPU, "h2d": H2D, "d2h": D2H, "storage_read": STORAGE, "storage_write": STORAGE + 1}
# What the duration of an operation depends on: kind, resource, parameters, bytes, whether host memory is pageable,
# whether an update writes beside the old state, the path of the storage, and the share of the CPU's update rate.
_OpClass = tuple[OpKind, Resource, int, float, bool, bool, int, float]


def simulate(plan: Plan, workload: Workload, machine: Machine) -> Schedule:
    """Run a plan on a machine. The same input gives the same output to the bit.

    Each resource runs the first operation of the plan that is ready, one at a time. Operations that run at the same
    time share as a fluid: both directions of the link the duplex limit (see `link_factors`), reads and writes of a path
    of the storage its limit, CPU updates, copies, reads and writes the bandwidth of host memory. The latter two slow
    all by one factor.

    Raises:
        MachineError: The machine lacks a rate that the plan needs.
        PlanError: Operations wait for each other.
    """
    schedule = Simulator(place(workload, plan.layers), machine).run(plan)
    assert schedule is not None
    return schedule


class Simulator:
    """Runs plans of one workload on one machine, see `simulate`."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine
        self._duplex_bytes_per_s = machine.duplex_bytes_per_s or INFINITE
        self._host_bytes_per_s = machine.host_memory_bytes_per_s or INFINITE
        self._storage_limits = tuple(path.duplex_bytes_per_s or INFINITE for path in machine.storage)
        self._link_left = link_shares(workload, machine)
        # Resource, seconds and bytes/s of host memory traffic of each class of operations that has occurred.
        self._work: dict[_OpClass, tuple[int, float, float]] = {}
        # Points of the iteration, and the seconds of compute until each of them, of the plan before.
        self._compute: tuple[list[float], list[float]] = [], []

    def run(self, plan: Plan, limit_s: float = INFINITE, steady: bool = True) -> Schedule | None:
        """Run a plan; None if the iteration was given up since it takes longer than the limit.

        With `steady` an iteration with late operations is repeated until it takes as long as the one before. One cycle
        (see `run_cycle`) is nearly as exact, and a quarter of the work. Raises as `simulate`."""
        if plan.has_late_operations:
            work = self.iteration_work(plan)
            limits = self._duplex_bytes_per_s, self._host_bytes_per_s
            if steady and not is_exact(plan):
                return run_iterations(plan, self._workload, work, *limits)
            return run_cycle(plan, self._workload, work, *limits, limit_s)
        points = {op.point for op in plan.ops} | needed_points(plan) | {FORWARD, BACKWARD, UPDATE}
        return self._run_iteration(plan, sorted(point for point in points if 0.0 < point <= UPDATE), limit_s)

    def iteration_work(self, plan: Plan) -> IterationWork:
        """Return the tasks of an iteration under a plan with late operations."""
        starts = {op.point for op in plan.ops} | needed_points(plan) | {BACKWARD}
        due = {op.due for op in plan.ops if op.due is not None} | {BACKWARD}
        occurring = starts | due | {FORWARD, UPDATE}
        points = sorted([*(point for point in occurring if 0.0 < point <= UPDATE), *(starts & due)])
        resource, alone_s, demand = self._work_of(plan)
        return IterationWork(
            resource,
            alone_s,
            demand,
            points,
            self._compute_lengths(points),
            self._machine.step_overhead_s or 0.0,
            self._link_left,
            self._storage_limits if plan.storage_buffers else (),
        )

    def _run_iteration(self, plan: Plan, points: list[float], limit_s: float) -> Schedule | None:
        graph = self._task_graph(plan, points)
        try:
            times = run_tasks(graph, self._duplex_bytes_per_s, self._host_bytes_per_s, limit_s)
        except RuntimeError as error:
            raise PlanError(f"policy {plan.policy}: {error}") from None
        return self._schedule(plan, points, *times) if times is not None else None

    def _task_graph(self, plan: Plan, points: list[float]) -> TaskGraph:
        """Return the tasks of one iteration: the operations of the plan, then the compute between any two points of
        the iteration, then the overhead of the step."""
        count = len(plan.ops)
        overhead = count + len(points)
        resource, alone_s, demand = self._work_of(plan)
        rest = overhead + 1 - count
        alone_s += [*self._compute_lengths(points), self._machine.step_overhead_s or 0.0]
        storage_limits = self._storage_limits if plan.storage_buffers else ()
        graph = TaskGraph(resource + [COMPUTE] * rest, alone_s, demand + [0.0] * rest, storage_limits)
        for task in range(count, overhead):
            graph.add_dependency(task, task + 1)
        compute_until = {point: count + number for number, point in enumerate(points)}
        pending, successors = graph.pending, graph.successors
        for index, op in enumerate(plan.ops):
            after, point = op.after, op.point
            for predecessor in after:
                successors[predecessor].append(index)
            pending[index] = len(after)
            if point > 0.0:
                successors[overhead if point > UPDATE else compute_until[point]].append(index)
                pending[index] += 1
            if op.blocking:
                graph.add_dependency(index, compute_until[point] + 1 if point > 0.0 else count)
            if op.needed is not None:
                graph.add_dependency(index, compute_until[op.needed] + 1)
        if self._link_left:
            phases = {task: phase_before(point) for point, task in compute_until.items()}
            left = self._link_left
            graph.link_left = {task: left[phase] for task, phase in phases.items() if phase in left}
        return graph

    def _compute_lengths(self, points: list[float]) -> list[float]:
        """Return the seconds of compute until each point of the iteration from the point before it."""
        if points != self._compute[0]:
            self._compute = points, _compute_lengths(self._workload, points)
        return self._compute[1]

    def _work_of(self, plan: Plan) -> tuple[list[int], list[float], list[float]]:
        """Return resource, seconds alone, and bytes/s of host memory traffic of each operation."""
        share = plan.cpu_share
        work = self._work
        in_place = plan.rolls_back
        classes: list[_OpClass] = [
            (op[0], op[1], op[3], op[4], op[7], op[12] and not in_place, op[13], share) for op in plan.ops
        ]
        try:
            entries = [work[op_class] for op_class in classes]
        except KeyError:
            durations = Durations(plan, self._workload, self._machine)
            for op_class, op in zip(classes, plan.ops, strict=True):
                seconds, traffic = durations.seconds(op), host_traffic(op, self._workload)
                work[op_class] = _INDEX[op.resource] + 2 * op.path, seconds, traffic / seconds if seconds > 0.0 else 0.0
            entries = [work[op_class] for op_class in classes]
        return (
            [resource for resource, _, _ in entries],
            [seconds for _, seconds, _ in entries],
            [traffic for _, _, traffic in entries],
        )

    def _schedule(self, plan: Plan, points: list[float], starts: list[float], ends: list[float]) -> Schedule:
        count = len(plan.ops)
        reached = dict(zip(points, ends[count:], strict=False))
        # The last gradient is ready when the backward ends. If copies block, the backward also waits for its copy.
        blocking_ends = (end for op, end in zip(plan.ops, ends, strict=False) if op.blocking)
        update_begin = max(reached[UPDATE], max(blocking_ends, default=0.0))
        update_end = max(ends, default=0.0)
        return Schedule(
            plan=plan,
            workload=self._workload,
            starts=starts[:count],
            ends=ends[:count],
            other_s=reached[FORWARD],
            forward_s=reached[BACKWARD] - reached[FORWARD],
            backward_s=update_begin - reached[BACKWARD],
            update_s=update_end - update_begin,
        )


def needed_points(plan: Plan) -> set[float]:
    """Return the points of the iteration at which compute waits for operations of a plan."""
    return {op.needed for op in plan.ops if op.needed is not None}


def _compute_lengths(workload: Workload, points: list[float]) -> list[float]:
    """Return the seconds of compute until each point of the iteration from the point before it."""
    lengths = []
    previous = 0.0
    for point in points:
        in_forward, in_backward = min(max(point - FORWARD, 0.0), 1.0), max(point - BACKWARD, 0.0)
        until = workload.other_s * min(point, 1.0) + workload.forward_s * in_forward + workload.backward_s * in_backward
        lengths.append(until - previous)
        previous = until
    return lengths


def is_exact(plan: Plan) -> bool:
    """Return whether one cycle is as long as any other: no operation may start before the backward."""
    return all(op.point >= BACKWARD for op in plan.ops)


def run_cycle(
    plan: Plan,
    workload: Workload,
    work: IterationWork,
    duplex_bytes_per_s: float,
    host_bytes_per_s: float,
    limit_s: float,
) -> Schedule | None:
    """Return the schedule of an iteration, from an iteration without late operations before it and the next forward.

    None if it takes longer than the limit, beyond which its exact length does not matter. Raises PlanError if
    operations wait for each other."""
    repeated = _early_operations(plan)
    graph = _task_graph(plan, work, repeated)
    before_backward_s = sum(
        seconds for point, seconds in zip(work.points, work.compute_s, strict=True) if point <= BACKWARD
    )
    # Repeated operations may end after the cycle.
    slack_s = before_backward_s + sum(work.alone_s[index] for index in repeated)
    try:
        times = run_tasks(graph, duplex_bytes_per_s, host_bytes_per_s, limit_s + slack_s)
    except RuntimeError as error:
        raise PlanError(f"policy {plan.policy}: {error}") from None
    return None if times is None else _schedule(plan, workload, work, repeated, *times)


def _early_operations(plan: Plan) -> dict[int, int]:
    """Return the operations that the next iteration may start before its backward, numbered in their order."""
    early: dict[int, int] = {}
    for index, op in enumerate(plan.ops):
        if op.point < BACKWARD and all(predecessor in early for predecessor in op.after):
            early[index] = len(early)
    return early


def _task_graph(plan: Plan, work: IterationWork, repeated: dict[int, int]) -> TaskGraph:
    """Return the tasks: operations, compute and overhead of one iteration; the start of the next one, its repeated
    operations, and its compute until the backward begins."""
    count, points = len(plan.ops), work.points
    before = [number for number, point in enumerate(points) if point <= BACKWARD]
    overhead = count + len(points)
    start = overhead + 1
    first_repeated = start + 1
    first_compute = first_repeated + len(repeated)
    last = first_compute + len(before) - 1
    graph = TaskGraph(
        [
            *work.resource,
            *[COMPUTE] * (len(points) + 2),
            *(work.resource[index] for index in repeated),
            *[COMPUTE] * len(before),
        ],
        [
            *work.alone_s,
            *work.compute_s,
            work.overhead_s,
            0.0,
            *(work.alone_s[index] for index in repeated),
            *(work.compute_s[number] for number in before),
        ],
        [*work.demand, *[0.0] * (len(points) + 2), *(work.demand[index] for index in repeated), *[0.0] * len(before)],
        work.storage_limits,
    )
    graph.stops_compute = frozenset(late_gpu_operations(plan))
    pending, successors = graph.pending, graph.successors
    for task in (*range(count, start), *range(first_compute, last)):
        successors[task].append(task + 1)
        pending[task + 1] += 1
    graph.add_dependency(start, first_compute)
    # Of a point that occurs twice, the second one: operations of the next iteration wait there as compute does.
    compute_until = {point: count + number for number, point in enumerate(points)}
    next_until = {points[number]: first_compute + number for number in before}
    gates = work.gates()
    for index, op in enumerate(plan.ops):
        for predecessor in op.after:
            successors[predecessor].append(index)
        gate = start if op.due is None else first_compute + gates[op.due]
        successors[index].append(gate)
        pending[gate] += 1
        pending[index] += len(op.after)
        if op.point > 0.0:
            successors[overhead if op.point > UPDATE else compute_until[op.point]].append(index)
            pending[index] += 1
        if op.blocking:
            graph.add_dependency(index, compute_until[op.point] + 1 if op.point > 0.0 else count)
        if op.needed is not None:
            graph.add_dependency(index, compute_until[op.needed] + 1)
    for index, number in repeated.items():
        op, task = plan.ops[index], first_repeated + number
        for predecessor in op.after:
            graph.add_dependency(first_repeated + repeated[predecessor], task)
        graph.add_dependency(next_until[op.point] if op.point > 0.0 else start, task)
        if op.needed in next_until and op.needed < BACKWARD:
            graph.add_dependency(task, next_until[op.needed] + 1)
    if work.link_left:
        for number, point in enumerate(points):
            left = work.link_left.get(phase_before(point))
            if left is not None:
                graph.link_left[count + number] = left
                if point <= BACKWARD:
                    graph.link_left[first_compute + number] = left
    return graph


def _schedule(
    plan: Plan,
    workload: Workload,
    work: IterationWork,
    repeated: dict[int, int],
    starts: list[float],
    ends: list[float],
) -> Schedule:
    """Return the schedule of the second iteration: until its backward as simulated, and from there as the first."""
    count, points = len(plan.ops), work.points
    start = count + len(points) + 1
    first_compute = start + 1 + len(repeated)
    begin = ends[start]
    before_backward_s = ends[count + points.index(BACKWARD)]
    backward_begin = ends[-1] - begin
    shift = backward_begin - before_backward_s
    blocking_ends = (end for op, end in zip(plan.ops, ends, strict=False) if op.blocking)
    update_begin = max(ends[count + points.index(UPDATE)], max(blocking_ends, default=0.0))
    forward_begin = ends[first_compute + points.index(FORWARD)] - begin
    forward_end = ends[first_compute + points.index(BACKWARD)] - begin
    op_starts, op_ends = ([time + shift for time in times[:count]] for times in (starts, ends))
    for index, number in repeated.items():
        op_starts[index] = starts[start + 1 + number] - begin
        op_ends[index] = ends[start + 1 + number] - begin
    return Schedule(
        plan=plan,
        workload=workload,
        starts=op_starts,
        ends=op_ends,
        other_s=forward_begin,
        forward_s=forward_end - forward_begin,
        backward_s=update_begin + shift - forward_end,
        update_s=begin - update_begin,
    )


@dataclass(frozen=True)
class Steps:
    """Schedules of the two kinds of steps."""

    valid: Schedule  # The schedule of a step that clipping does not change.
    redone: Schedule | None = None  # The schedule of one that it changes; None if the plan does not speculate.

    @property
    def plan(self) -> Plan:
        return self.valid.plan

    @property
    def iteration_s(self) -> float:
        """The mean iteration, s."""
        return self.mean("iteration_s")

    def cost(self, machine: Machine) -> tuple[bool, bool, float]:
        """Return whether the plan exceeds the memory of the device, and of the host, and its mean iteration, s."""
        available = available_host_bytes(self.valid.workload, machine)
        exceeds_host = available is not None and self.valid.host_bytes() > available
        return self.valid.fits_device(None) is False, exceeds_host, self.iteration_s

    def mean(self, key: str) -> float:
        """Return the mean of an attribute of the schedules, by `Workload.clip_active_share`."""
        value: float = getattr(self.valid, key)
        if self.redone is None:
            return value
        share = self.valid.workload.clip_active_share
        return (1 - share) * value + share * float(getattr(self.redone, key))


def simulate_steps(plan: Plan, workload: Workload, machine: Machine) -> Steps:
    """Run a plan on a machine, in a step that clipping does not change and in one that it changes (see `simulate`)."""
    valid = simulate(plan, workload, machine)
    return Steps(valid, simulate(redone(plan), workload, machine) if plan.speculated else None)
