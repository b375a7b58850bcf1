"""The tasks of an iteration under a plan and its schedule: alone, before the start of the next one, or one of many."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ebbtide.errors import PlanError
from ebbtide.interleave.model.durations import phase_before
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.event_loop import INFINITE, TaskGraph, run_tasks

# Iterations in a row, until they repeat. The one before the last is the result: the last has no next one.
_COUNTS = (4, 8, 16, 32, 64)
# Times that differ by less, relative to an iteration, are equal.
_SAME_TIMES = 1e-9


@dataclass(frozen=True)
class IterationWork:
    """The tasks of one iteration: its start, the compute until each point, the overhead of the step, the operations."""

    plan: Plan
    workload: Workload
    # The points of the iteration between which compute runs without a stop, ascending, without its start. Those at
    # which late operations are due and others may start occur twice, as does that of the backward: when compute arrives
    # there, and when it has waited.
    points: list[float]
    # By task, see `TaskGraph`.
    resource: list[int]
    alone_s: list[float]
    demand: list[float]
    link_left: dict[str, tuple[float, float]]  # By phase: the shares of the link that the job's collectives leave.
    duplex_bytes_per_s: float
    host_bytes_per_s: float
    storage_limits: tuple[float, ...] = ()

    @property
    def first_op(self) -> int:
        """The task of the first operation; the others follow."""
        return len(self.resource) - len(self.plan.ops)

    def run(self, iterations: Sequence["IterationWork"], limit_s: float) -> tuple[list[float], list[float]] | None:
        """Return start and end of each task of iterations in a row, see `run_tasks`."""
        try:
            return run_tasks(_task_graph(iterations), self.duplex_bytes_per_s, self.host_bytes_per_s, limit_s)
        except RuntimeError as error:
            raise PlanError(f"policy {self.plan.policy}: {error}") from None

    def before_backward(self, early: dict[int, int]) -> "IterationWork":
        """Return the compute until the backward begins, and operations that start before it, which are numbered."""
        points = [point for point in self.points if point <= BACKWARD]
        tasks = [*range(1 + len(points)), *(self.first_op + index for index in early)]
        ops = [
            op._replace(
                after=tuple(early[predecessor] for predecessor in op.after),
                blocking=False,
                due=None,
                needed=op.needed if op.needed is not None and op.needed < BACKWARD else None,
            )
            for op in map(self.plan.ops.__getitem__, early)
        ]
        return replace(
            self,
            plan=replace(self.plan, ops=tuple(ops)),
            points=points,
            resource=[self.resource[task] for task in tasks],
            alone_s=[self.alone_s[task] for task in tasks],
            demand=[self.demand[task] for task in tasks],
        )

    def reached(self, point: float, ends: list[float], start: int = 0) -> float:
        """Return when compute arrives at a point, from the end of the start, which is the task `start`."""
        return ends[start + 1 + self.points.index(point)] - ends[start]


def run_once(work: IterationWork, limit_s: float) -> Schedule | None:
    """Return the schedule of an iteration without late operations; None if it takes longer than the limit."""
    times = work.run([work], limit_s)
    return None if times is None else _schedule(work, *times)


def run_iterations(work: IterationWork) -> Schedule:
    """Return the schedule of the iterations that repeat in the steady state: one, or some that differ. Those of a plan
    that does not settle have the note that it does not."""
    tasks = len(work.resource)
    settles, cycle = False, range(0)
    for count in _COUNTS:
        times = work.run([work] * count, INFINITE)
        assert times is not None
        starts, ends = times
        period = _period(np.array(times).reshape(2, count, tasks))
        settles, cycle = bool(period), range(count - 1 - (period or count // 2), count - 1)
        if settles:
            break
    return Schedule.of_cycle([_schedule(work, starts, ends, number * tasks) for number in cycle], settles)


def _period(times: np.ndarray) -> int:
    """Return after how many iterations everything repeats; 0 if it does not. `times` are start and end, of each
    iteration, of each task.

    The begin of an iteration finds operations of the one before alone. So whatever follows the last iteration follows
    an earlier one too, if in both all tasks have the same times, and so has what runs on from the iteration before."""
    begins = times[1, :, 0]
    own = times - begins[:, None]
    carried = np.maximum(times[:, :-1] - begins[1:, None], 0.0)
    # No iteration follows the last one, and none comes before the first.
    states = np.concatenate([own[:, 1:-1], carried[:, :-1]], axis=2)
    differences = np.abs(states[:, ::-1] - states[:, -1:]).max(axis=(0, 2))
    length_s = begins[-1] - begins[-2]
    equal = np.flatnonzero(differences[1:] <= _SAME_TIMES * length_s) + 1
    return int(equal[0]) if len(equal) and 2 * equal[0] < len(begins) - 1 else 0


def is_exact(plan: Plan) -> bool:
    """Return whether one cycle is as long as any other: no operation may start before the backward."""
    return all(op.point >= BACKWARD for op in plan.ops)


def run_cycle(work: IterationWork, limit_s: float) -> Schedule | None:
    """Return the schedule of an iteration from two in a row: of the second until its backward, and from there of the
    first, before which there are no late operations. None if it takes longer than the limit."""
    # Operations that the next iteration may start before its backward, numbered in their order.
    early: dict[int, int] = {}
    for index, op in enumerate(work.plan.ops):
        if op.point < BACKWARD and all(predecessor in early for predecessor in op.after):
            early[index] = len(early)
    following, start = work.before_backward(early), len(work.resource)
    # Those operations may end after the cycle.
    slack_s = sum(following.alone_s[: following.first_op]) + sum(following.alone_s[following.first_op :])
    times = work.run([work, following], limit_s + slack_s)
    if times is None:
        return None
    starts, ends = times
    begin = ends[start]
    shift = ends[start + len(following.points)] - begin - work.reached(BACKWARD, ends)
    op_starts, op_ends = ([time + shift for time in entries[work.first_op : start]] for entries in times)
    for index, number in early.items():
        task = start + following.first_op + number
        op_starts[index], op_ends[index] = starts[task] - begin, ends[task] - begin
    forward_begin, forward_end = (following.reached(point, ends, start) for point in (FORWARD, BACKWARD))
    update_begin = _update_begin(work, ends[work.first_op :], work.reached(UPDATE, ends))
    return Schedule(
        plan=work.plan,
        workload=work.workload,
        starts=op_starts,
        ends=op_ends,
        other_s=forward_begin,
        forward_s=forward_end - forward_begin,
        backward_s=update_begin + shift - forward_end,
        update_s=begin - update_begin,
    )


def _schedule(work: IterationWork, starts: list[float], ends: list[float], start: int = 0) -> Schedule:
    """Return the schedule of the iteration that begins with the task `start`, with times from its end."""
    first, last = start + work.first_op, start + len(work.resource)
    begin = ends[start]
    op_ends = [end - begin for end in ends[first:last]]
    # A wait at the beginning of a phase belongs to it.
    forward_begin, backward_begin, update_arrived = (
        work.reached(point, ends, start) for point in (FORWARD, BACKWARD, UPDATE)
    )
    update_begin = _update_begin(work, op_ends, update_arrived)
    return Schedule(
        plan=work.plan,
        workload=work.workload,
        starts=[time - begin for time in starts[first:last]],
        ends=op_ends,
        other_s=forward_begin,
        forward_s=backward_begin - forward_begin,
        backward_s=update_begin - backward_begin,
        update_s=(ends[last] if last < len(ends) else max(ends)) - begin - update_begin,
    )


def _update_begin(work: IterationWork, op_ends: list[float], arrived_s: float) -> float:
    """Return when the update begins: with the last gradient, or when the backward has waited for its blocking copy."""
    blocking_ends = (end for op, end in zip(work.plan.ops, op_ends, strict=False) if op.blocking)
    return max(arrived_s, max(blocking_ends, default=0.0))


def _task_graph(iterations: Sequence[IterationWork]) -> TaskGraph:
    """Return the tasks of iterations in a row. Those of an earlier iteration go first on each resource."""
    graph = TaskGraph(
        [resource for work in iterations for resource in work.resource],
        [seconds for work in iterations for seconds in work.alone_s],
        [traffic for work in iterations for traffic in work.demand],
        iterations[0].storage_limits,
    )
    pending, successors = graph.pending, graph.successors
    start = 0
    late_on_gpu: list[int] = []
    for work, following in zip(iterations, (*iterations[1:], None), strict=True):
        points, first_op, next_start = work.points, start + work.first_op, start + len(work.resource)
        for task in range(start, first_op - 1):
            graph.add_dependency(task, task + 1)
        # Of a point that occurs twice, the second one: operations of the next iteration wait there as compute does.
        reached = {0.0: start, **{point: task for task, point in enumerate(points, start + 1)}}
        # What is due at a point stops compute there: that of the next task, from when compute first arrives.
        gates: dict[float | None, int] = {None: next_start}
        if following is not None:
            graph.add_dependency(first_op - 1, next_start)
            gates |= {point: task + 1 for task, point in reversed([*enumerate(following.points, next_start + 1)])}
        for task, op in enumerate(work.plan.ops, first_op):
            for predecessor in op.after:
                successors[first_op + predecessor].append(task)
            # After all points comes the overhead of the step.
            successors[reached.get(op.point, first_op - 1)].append(task)
            pending[task] = len(op.after) + 1
            if op.blocking:
                graph.add_dependency(task, reached[op.point] + 1)
            if op.needed is not None:
                graph.add_dependency(task, reached[op.needed] + 1)
            if following is not None:
                graph.add_dependency(task, gates[op.due])
            if op.due is not None and op.resource == "gpu":
                late_on_gpu.append(task)
        if work.link_left:
            left = {task: work.link_left.get(phase_before(point)) for task, point in enumerate(points, start + 1)}
            graph.link_left |= {task: shares for task, shares in left.items() if shares is not None}
        start = next_start
    graph.stops_compute = frozenset(late_on_gpu)
    return graph
