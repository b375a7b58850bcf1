"""The schedule of an iteration under a plan: alone, before the start of the next one,
or one of many."""

import numpy as np

from ebbtide.interleave.model.plan import BACKWARD, FORWARD, UPDATE, Plan
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.fluid import INFINITE
from ebbtide.interleave.simulation.tasks import IterationWork, run_tasks

# Iterations in a row, until they repeat. The one before the last is the result: the
# last has no next one.
_COUNTS = (4, 8, 16, 32, 64)
# Times that differ by less, relative to an iteration, are equal.
_SAME_TIMES = 1e-9


def run_once(work: IterationWork, limit_s: float) -> Schedule | None:
    """Return the schedule of an iteration without late operations.

    Return None if it takes longer than the limit.
    """
    times = run_tasks([work], limit_s)
    return None if times is None else _schedule(work, *times)


def run_iterations(work: IterationWork) -> Schedule:
    """Return the schedule of the iteration that repeats in the steady state, or of some
    that differ.

    Iterations of a plan that does not settle have the note that it does not."""
    tasks = len(work)
    settles, cycle = False, range(0)
    for count in _COUNTS:
        times = run_tasks([work] * count, INFINITE)
        assert times is not None
        starts, ends = times
        period = _period(np.array(times).reshape(2, count, tasks))
        settles, cycle = (
            bool(period),
            range(count - 1 - (period or count // 2), count - 1),
        )
        if settles:
            break
    return Schedule.of_cycle(
        [_schedule(work, starts, ends, number * tasks) for number in cycle], settles
    )


def _period(times: np.ndarray) -> int:
    """Return after how many iterations everything repeats; 0 if it does not. `times`
    are start and end, of each iteration, of each task.

    The begin of an iteration finds operations of the one before alone. So whatever
    follows the last iteration follows an earlier one too, if in both all tasks have the
    same times, and so has what runs on from the iteration before."""
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
    """Return whether one cycle is as long as any other.

    No operation may start before the backward then.
    """
    return all(op.start >= BACKWARD for op in plan.ops)


def run_cycle(work: IterationWork, limit_s: float) -> Schedule | None:
    """Return the schedule of an iteration from two in a row; None if it takes longer
    than the limit.

    It is the second until its backward, and from there the first, which has no late
    operations before it."""
    # Operations that the next iteration may start before its backward, numbered in
    # their order.
    early: dict[int, int] = {}
    for index, op in enumerate(work.plan.ops):
        if op.start < BACKWARD and all(
            predecessor in early for predecessor in op.after
        ):
            early[index] = len(early)
    following, start = work.before_backward(early), len(work)
    # Those operations may end after the cycle.
    slack_s = float(following.work.alone_s.sum())
    times = run_tasks([work, following], limit_s + slack_s)
    if times is None:
        return None
    starts, ends = times
    begin = ends[start]
    shift = ends[start + len(following.points)] - begin - work.reached(BACKWARD, ends)
    op_starts, op_ends = (
        [time + shift for time in entries[work.first_op : start]] for entries in times
    )
    for index, number in early.items():
        task = start + following.first_op + number
        op_starts[index], op_ends[index] = starts[task] - begin, ends[task] - begin
    forward_begin, forward_end = (
        following.reached(point, ends, start) for point in (FORWARD, BACKWARD)
    )
    update_begin = _update_begin(
        work, ends[work.first_op :], work.reached(UPDATE, ends)
    )
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


def _schedule(
    work: IterationWork, starts: list[float], ends: list[float], start: int = 0
) -> Schedule:
    """Return the schedule of the iteration that begins with the task `start`.

    Times are from the end of this task.
    """
    first, last = start + work.first_op, start + len(work)
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
    """Return when the update begins: with the last gradient, or when the backward has
    waited for its blocking copy."""
    blocking_ends = (
        end for op, end in zip(work.plan.ops, op_ends, strict=False) if op.is_blocking
    )
    return max(arrived_s, max(blocking_ends, default=0.0))
