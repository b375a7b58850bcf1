"""The tasks of iterations in a row under a plan: compute, the overhead of the step, and
the operations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ebbtide.errors import PlanError
from ebbtide.interleave.model.plan import BACKWARD, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.simulation import fluid
from ebbtide.interleave.simulation.fluid import Tasks
from ebbtide.interleave.simulation.lanes import Lanes

Array = np.ndarray[Any, Any]
Times = tuple[list[float], list[float]]
# Python runs this many tasks in the time in which numba is loaded.
_TASKS_IN_PYTHON = 60_000


class Work(NamedTuple):
    """Columns of tasks that do not depend on others, see `Tasks`."""

    lane: Array
    alone_s: Array
    demand: Array
    mode: Array

    def chosen(self, tasks: Sequence[int]) -> "Work":
        """Return some of the tasks."""
        return Work(*(column[tasks] for column in self))


@dataclass(frozen=True)
class IterationWork:
    """The tasks of one iteration: its start, the compute until each point, the overhead
    of the step, and the operations."""

    plan: Plan
    workload: Workload
    # The points of the iteration between which compute runs without a stop, ascending,
    # without its start. Points at which late operations are due and others may start
    # occur twice, as does the point of the backward: when compute arrives there, and
    # when it has waited.
    points: list[float]
    work: Work
    lanes: Lanes

    def __len__(self) -> int:
        return len(self.work.lane)

    @property
    def first_op(self) -> int:
        """The task of the first operation; the others follow."""
        return len(self) - len(self.plan.ops)

    def before_backward(self, early: dict[int, int]) -> "IterationWork":
        """Return the compute until the backward begins, and operations before it.

        The operations start before it, and are numbered.
        """
        points = [point for point in self.points if point <= BACKWARD]
        tasks = [*range(1 + len(points)), *(self.first_op + index for index in early)]
        ops = [
            op._replace(
                after=tuple(early[predecessor] for predecessor in op.after),
                holds=op.holds
                if op.holds is not None and not op.is_late and op.holds.point < BACKWARD
                else None,
            )
            for op in map(self.plan.ops.__getitem__, early)
        ]
        work = self.work.chosen(tasks)
        # They stop no compute of the iteration that they are not due in.
        work.mode[1 + len(points) :] = 0
        return replace(
            self, plan=replace(self.plan, ops=tuple(ops)), points=points, work=work
        )

    def reached(self, point: float, ends: list[float], start: int = 0) -> float:
        """Return when compute arrives at a point, from the end of the start, which is
        the task `start`."""
        return ends[start + 1 + self.points.index(point)] - ends[start]


def run_tasks(iterations: Sequence[IterationWork], limit_s: float) -> Times | None:
    """Return start and end of each task of iterations in a row, in s.

    Return None if the last one surely ends after a limit.

    Raises:
        PlanError: Operations wait for each other.
    """
    tasks, bandwidth = tasks_of(iterations), iterations[0].lanes.bandwidth
    starts, ends, done = _LOOP.run(tasks, bandwidth, limit_s * (1 + 1e-9))
    if done < 0:
        raise PlanError(
            f"policy {iterations[0].plan.policy}: operations wait for each other"
        )
    return None if done < len(starts) else (starts, ends)


class _Loop:
    """The event loop, compiled where numba is installed and there are many tasks."""

    def __init__(self) -> None:
        self._tasks_left = _TASKS_IN_PYTHON
        self._compiled: Any = None

    def run(self, tasks: Tasks, *limits: Any) -> Any:
        """Return what `fluid.run` does."""
        if self._tasks_left > 0:
            self._tasks_left -= len(tasks.lane)
            if self._tasks_left <= 0:
                self._compiled = _compiled_loop()
        if self._compiled is not None:
            return self._compiled(tasks, *limits)
        return run_in_python(tasks, *limits)


_LOOP = _Loop()


def _compiled_loop() -> Any:
    try:
        from ebbtide.interleave.simulation import compiled_fluid
    except ModuleNotFoundError:
        return None
    return compiled_fluid.run


def run_in_python(
    tasks: Tasks, bandwidth: fluid.Bandwidth, limit_s: float
) -> tuple[list[float], list[float], int]:
    """Return start and end of each task, and how many ended, see `fluid.run`. Lists are
    faster to read than arrays."""
    tasks = Tasks(*(column.tolist() for column in tasks))
    bandwidth = fluid.Bandwidth(*(column.tolist() for column in bandwidth))
    state = fluid.new_state(
        tasks, bandwidth, lambda count: [0.0] * count, lambda count: [0] * count
    )
    done = fluid.run(tasks, bandwidth, state, limit_s)
    return state.starts, state.ends, done


def tasks_of(iterations: Sequence[IterationWork]) -> Tasks:
    """Return the tasks of iterations in a row.

    Tasks of an earlier iteration go first on each lane.
    """
    if len(iterations) == 1:
        before, after = map(np.array, _edges(iterations[0], None))
        return Tasks(*iterations[0].work, before, after)
    start, edges = 0, []
    own: dict[tuple[int, int], Array] = {}
    for work, following in zip(iterations, (*iterations[1:], None), strict=True):
        key = id(work), id(following)
        if key not in own:
            own[key] = np.array(_edges(work, following))
        edges.append(own[key] + start)
        start += len(work)
    columns = zip(*(work.work for work in iterations), strict=True)
    return Tasks(*map(np.concatenate, columns), *np.concatenate(edges, axis=1))


def _edges(
    work: IterationWork, following: IterationWork | None
) -> tuple[list[int], list[int]]:
    """Return pairs of tasks, the second of which waits for the first, of an iteration
    whose start is task 0."""
    ops, first, end = work.plan.ops, work.first_op, len(work)
    tasks = range(first, end)
    # Of a point that occurs twice, the second one: operations of the next iteration
    # wait there as compute does.
    reached = {0.0: 0, **{point: task for task, point in enumerate(work.points, 1)}}
    before = [*range(first - 1), *(first + index for op in ops for index in op.after)]
    after = [
        *range(1, first),
        *(task for task, op in zip(tasks, ops, strict=True) for _ in op.after),
    ]
    # After all points comes the overhead of the step.
    before += [reached.get(op.start, first - 1) for op in ops]
    after += tasks
    for task, op in zip(tasks, ops, strict=True):
        if op.holds is not None and not op.is_late:
            before.append(task)
            after.append(reached[op.holds.point] + 1)
    if following is not None:
        # What is due at a point stops compute there: the compute of the next task, from
        # when compute first arrives.
        arrivals = reversed([*enumerate(following.points, end + 2)])
        gates: dict[float | None, int] = {
            None: end,
            **{point: task for task, point in arrivals},
        }
        before += [first - 1, *tasks]
        after += [end, *(gates[op.due] for op in ops)]
    return before, after
