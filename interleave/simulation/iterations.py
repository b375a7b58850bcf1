"""Iterations in a row, for plans whose late operations end in the next one."""

from dataclasses import dataclass

from ebbtide.errors import PlanError
from ebbtide.interleave.model.durations import phase_before
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.event_loop import COMPUTE, TaskGraph, run_tasks

# Iterations at first, and the most. The one before the last is the result: the last has no next one.
_FEWEST, _MOST = 4, 64
# Lengths of iterations that differ by less, relatively, are equal.
_SAME_LENGTH = 1e-9


@dataclass(frozen=True)
class IterationWork:
    """The tasks of one iteration."""

    resource: list[int]
    alone_s: list[float]
    demand: list[float]
    # The points of the iteration between which compute runs without a stop, ascending, without its start. Those at
    # which late operations are due and others may start occur twice, as does that of the backward: when compute arrives
    # there, and when it has waited.
    points: list[float]
    compute_s: list[float]
    overhead_s: float
    link_left: dict[str, tuple[float, float]]  # By phase: the shares of the link that the job's collectives leave.
    storage_limits: tuple[float, ...] = ()

    @property
    def tasks(self) -> int:
        """Number of tasks: operations, the start, stretches of compute, and the overhead of the step."""
        return len(self.resource) + len(self.points) + 2

    def gates(self) -> dict[float, int]:
        """Return by point the number of the stretch of compute that waits for what is due there."""
        points = self.points
        return {point: number + (points[number - 1] != point) for number, point in enumerate(points)}


def run_iterations(
    plan: Plan, workload: Workload, work: IterationWork, duplex_bytes_per_s: float, host_bytes_per_s: float
) -> Schedule:
    """Return the schedule of an iteration in the steady state, in which each takes as long as the one before."""
    iterations = _FEWEST
    while True:
        graph = _task_graph(plan, work, iterations)
        try:
            times = run_tasks(graph, duplex_bytes_per_s, host_bytes_per_s, float("inf"))
        except RuntimeError as error:
            raise PlanError(f"policy {plan.policy}: {error}") from None
        assert times is not None
        starts, ends = times
        begins = [ends[number * work.tasks] for number in range(iterations)]
        last_s, before_s = begins[-1] - begins[-2], begins[-2] - begins[-3]
        if abs(last_s - before_s) <= _SAME_LENGTH * last_s or 2 * iterations > _MOST:
            return _schedule(plan, workload, work, starts, ends, iterations - 2)
        iterations *= 2


def late_gpu_operations(plan: Plan) -> list[int]:
    """Return the indices of the late operations of the GPU, which compute does not run beside."""
    return [index for index, op in enumerate(plan.ops) if op.due is not None and op.resource == "gpu"]


def _task_graph(plan: Plan, work: IterationWork, iterations: int) -> TaskGraph:
    """Return the tasks of iterations in a row. Those of an earlier iteration go first on each resource."""
    rest = len(work.points) + 1
    graph = TaskGraph(
        [COMPUTE, *work.resource, *[COMPUTE] * rest] * iterations,
        [0.0, *work.alone_s, *work.compute_s, work.overhead_s] * iterations,
        [0.0, *work.demand, *[0.0] * rest] * iterations,
        work.storage_limits,
    )
    # Of a point that occurs twice, the second one: operations of the next iteration wait there as compute does.
    compute_until = {point: 1 + len(plan.ops) + number for number, point in enumerate(work.points)}
    gates = {point: 1 + len(plan.ops) + number for point, number in work.gates().items()}
    overhead = work.tasks - 1
    late_on_gpu = late_gpu_operations(plan)
    graph.stops_compute = frozenset(
        number * work.tasks + 1 + index for number in range(iterations) for index in late_on_gpu
    )
    # Compute after a point is the next task; what waits for a point of the iteration waits for the task before it.
    for number in range(iterations):
        base = number * work.tasks
        graph.add_dependency(base, base + 1 + len(plan.ops))
        for task in range(base + 1 + len(plan.ops), base + overhead):
            graph.add_dependency(task, task + 1)
        if number:
            graph.add_dependency(base - 1, base)
        for index, op in enumerate(plan.ops):
            task = base + 1 + index
            for predecessor in op.after:
                graph.add_dependency(base + 1 + predecessor, task)
            reached = overhead if op.point > UPDATE else compute_until[op.point] if op.point > 0.0 else 0
            graph.add_dependency(base + reached, task)
            if op.blocking:
                graph.add_dependency(task, base + (compute_until[op.point] if op.point > 0.0 else len(plan.ops)) + 1)
            if op.needed is not None:
                graph.add_dependency(task, base + compute_until[op.needed] + 1)
            if number + 1 < iterations:
                next_base = base + work.tasks
                graph.add_dependency(task, next_base + (0 if op.due is None else gates[op.due]))
        for task, point in enumerate(work.points, base + 1 + len(plan.ops)):
            if (phase := phase_before(point)) in work.link_left:
                graph.link_left[task] = work.link_left[phase]
    return graph


def _schedule(
    plan: Plan, workload: Workload, work: IterationWork, starts: list[float], ends: list[float], number: int
) -> Schedule:
    """Return the schedule of one of the iterations, with times from its start."""
    base = number * work.tasks
    count = len(plan.ops)
    begin = ends[base]
    first = base + 1
    # A wait at the beginning of a phase belongs to it.
    reached = {point: ends[first + count + work.points.index(point)] - begin for point in (FORWARD, BACKWARD, UPDATE)}
    op_ends = [end - begin for end in ends[first : first + count]]
    blocking_ends = (end for op, end in zip(plan.ops, op_ends, strict=True) if op.blocking)
    update_begin = max(reached[UPDATE], max(blocking_ends, default=0.0))
    return Schedule(
        plan=plan,
        workload=workload,
        starts=[start - begin for start in starts[first : first + count]],
        ends=op_ends,
        other_s=reached[FORWARD],
        forward_s=reached[BACKWARD] - reached[FORWARD],
        backward_s=update_begin - reached[BACKWARD],
        update_s=ends[base + work.tasks] - begin - update_begin,
    )
