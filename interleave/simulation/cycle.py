"""One cycle of a plan with late operations: from the beginning of a backward to that of the next one.

No late operation is left when a backward begins, so one cycle is as long as any other, unless operations that start
before the backward are still running then.
"""

from __future__ import annotations

from ebbtide.errors import PlanError
from ebbtide.interleave.model.durations import phase_before
from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation.event_loop import COMPUTE, TaskGraph, run_tasks
from ebbtide.interleave.simulation.iterations import IterationWork, late_gpu_operations


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

    Args:
        plan: The plan.
        workload: The workload.
        work: The tasks of one iteration.
        duplex_bytes_per_s: Limit of both directions of the link together.
        host_bytes_per_s: Limit of all traffic in host memory.
        limit_s: A length of the iteration beyond which its exact length does not matter.

    Returns:
        The schedule; None if the iteration was given up since it takes longer than the limit.

    Raises:
        PlanError: Operations wait for each other.
    """
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
        [
            *work.demand,
            *[0.0] * (len(points) + 2),
            *(work.demand[index] for index in repeated),
            *[0.0] * len(before),
        ],
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
    for index, number in repeated.items():
        op, task = plan.ops[index], first_repeated + number
        for predecessor in op.after:
            graph.add_dependency(first_repeated + repeated[predecessor], task)
        graph.add_dependency(next_until[op.point] if op.point > 0.0 else start, task)
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
