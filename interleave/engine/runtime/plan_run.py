"""One execution of a plan: what its operations wait for, and when they ran."""

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from ebbtide.interleave.engine.devices.device import Mark
from ebbtide.interleave.model.operations import DEVICE_RESOURCES, Op, Resource
from ebbtide.interleave.model.plan import Plan


class PlanRun:
    """The state of an execution. Lists are indexed by operation; times are seconds
    since `begin_s` (None: now) on the clock of time.perf_counter. `inputs`: the input
    that an operation also waits for. One on the device can be issued when those before
    it there are issued, any other can start when those before it are done."""

    def __init__(
        self, plan: Plan, inputs: Mapping[int, int], begin_s: float | None = None
    ) -> None:
        count = len(plan.ops)
        self.plan = plan
        self.begin_s = time.perf_counter() if begin_s is None else begin_s
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.done = [False] * count
        # The point of the iteration that the job has reached.
        self.point = -1.0
        # Numbers of operations that have not ended, and of those among them that are
        # not late.
        self.remaining = count
        self.remaining_on_time = sum(not op.is_late for op in plan.ops)
        # (operation, start, end) of executions that were repeated.
        self.discarded: list[tuple[int, float, float]] = []
        # Operations that are running and must be repeated.
        self._outdated: set[int] = set()
        self._taken = [False] * count
        # The mark behind each operation that is issued; and what its stream waits for
        # besides operations.
        self._end_marks: list[Mark | None] = [None] * count
        self._marks: list[list[Mark]] = [[] for _ in range(count)]
        self._dependents: list[list[int]] = [[] for _ in range(count)]
        # How many operations and inputs each one waits for until it can start; and how
        # many are not done.
        self._missing = [len(op.after) for op in plan.ops]
        self._undone = [len(op.after) for op in plan.ops]
        # Operations that wait for an input, by its number; and for a point only, as a
        # heap of (point, operation).
        self._blocked: dict[int, list[int]] = {}
        self._op_points = sorted({op.start for op in plan.ops})
        self._point_marks: list[tuple[float, Mark]] = []
        self._gated: list[tuple[float, int]] = []
        # Operations that can start, as heaps; and those on the device that can be
        # issued ahead of time.
        # They are ordered by the plan, and repeated ones by the first operation that
        # waits for them.
        self._keys = list(range(count))
        self._ready: dict[Resource, list[tuple[int, int]]] = defaultdict(list)
        self._ahead: dict[Resource, list[tuple[int, int]]] = defaultdict(list)
        for index, op in enumerate(plan.ops):
            for dependency in op.after:
                self._dependents[dependency].append(index)
        for index, number in inputs.items():
            self._missing[index] += 1
            self._blocked.setdefault(number, []).append(index)
        for index in range(count):
            if not self._missing[index]:
                self._enqueue(index)

    @property
    def waits_for_the_job(self) -> bool:
        """Whether operations wait for an input or a point of the iteration."""
        return bool(self._gated or any(self._blocked.values()))

    def advance_to(self, point: float, record: Callable[[], Mark]) -> None:
        """Let operations start that wait for a point.

        Their streams wait for a mark, which is recorded if necessary.
        """
        if bisect_right(self._op_points, point) > bisect_right(
            self._op_points, self.point
        ):
            self._point_marks.append((point, record()))
        self.point = point
        while self._gated and self._gated[0][0] <= point:
            self._enqueue(heappop(self._gated)[1])

    def mark_available(self, number: int, marks: Sequence[Mark]) -> None:
        """Let operations start that wait for an input, which is there when marks are
        passed."""
        for index in self._blocked.pop(number, ()):
            self._marks[index] += marks
            self._count_down(index)

    def take(self, lane: Resource, can_start: Callable[[Op], bool]) -> int | None:
        """Return the first operation that a lane can start.

        Otherwise return the first that can be issued ahead of time.
        """
        for queue in (self._ready[lane], self._ahead[lane]):
            index = self._pop_first(queue, can_start)
            if index is not None:
                self._taken[index] = True
                return index
        return None

    def can_take(self, lane: Resource, can_start: Callable[[Op], bool]) -> bool:
        """Return whether `take` would return an operation."""
        queues = (self._ready[lane], self._ahead[lane])
        return any(
            not self._taken[index]
            and not self._missing[index]
            and can_start(self.plan.ops[index])
            for queue in queues
            for _, index in queue
        )

    def marks_before(self, index: int) -> list[Mark]:
        """Return the marks that the stream of an operation must wait for."""
        op = self.plan.ops[index]
        others = [
            self._end_marks[dependency]
            for dependency in op.after
            if not self.done[dependency]
            and self.plan.ops[dependency].resource != op.resource
        ]
        return [mark for mark in others if mark is not None] + self._marks[index]

    def issue(self, index: int, end: Mark) -> None:
        """Record that an operation on the device is issued, with a mark behind it."""
        self._end_marks[index] = end
        for dependent in self._dependents[index]:
            if self.plan.ops[dependent].resource in DEVICE_RESOURCES:
                self._count_down(dependent)

    def repeat(self, indices: Iterable[int]) -> None:
        """Let operations run again that have begun. Nothing that follows them may have,
        or it is repeated, too; one on the device must be done."""
        for index in indices:
            if not self.done[index]:
                self._outdated.add(index)
                continue
            self.discarded.append((index, self.starts[index], self.ends[index]))
            self.done[index] = False
            self.remaining += 1
            self.remaining_on_time += not self.plan.ops[index].is_late
            for dependent in self._dependents[index]:
                self._undone[dependent] += 1
                self._missing[dependent] += 1
            self._take_again(index)

    def add_mark(self, index: int, mark: Mark) -> None:
        """Let the stream of an operation that is not issued wait for a mark, too."""
        self._marks[index].append(mark)

    def complete(self, index: int, start_s: float, end_s: float) -> None:
        """Record that an operation is done, with its times on the clock of
        time.perf_counter."""
        start, end = start_s - self.begin_s, end_s - self.begin_s
        if index in self._outdated:
            self._outdated.remove(index)
            self.discarded.append((index, start, end))
            self._take_again(index)
            return
        self.starts[index], self.ends[index] = start, end
        self.done[index] = True
        self.remaining -= 1
        self.remaining_on_time -= not self.plan.ops[index].is_late
        self._end_marks[index] = None
        was_issued = self.plan.ops[index].resource in DEVICE_RESOURCES
        for dependent in self._dependents[index]:
            self._undone[dependent] -= 1
            if (
                not was_issued
                or self.plan.ops[dependent].resource not in DEVICE_RESOURCES
            ):
                self._count_down(dependent)
            elif not self._undone[dependent] and self._is_ahead(dependent):
                heappush(
                    self._ready[self.plan.ops[dependent].resource],
                    (self._keys[dependent], dependent),
                )

    def _pop_first(
        self, queue: list[tuple[int, int]], can_start: Callable[[Op], bool]
    ) -> int | None:
        """Remove and return the first operation of a heap that can start and was not
        taken."""
        passed_over = []
        first = None
        while queue and first is None:
            _, index = heappop(queue)
            # One that waits again for what is repeated comes back then.
            if self._taken[index] or self._missing[index]:
                continue
            if can_start(self.plan.ops[index]):
                first = index
            else:
                passed_over.append(index)
        for index in passed_over:
            heappush(queue, (self._keys[index], index))
        return first

    def _take_again(self, index: int) -> None:
        self._taken[index] = False
        self._keys[index] = min(self._dependents[index], default=index)
        if not self._missing[index]:
            self._enqueue(index)

    def _is_ahead(self, index: int) -> bool:
        return (
            not self._missing[index]
            and self.plan.ops[index].start <= self.point
            and not self._taken[index]
        )

    def _count_down(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        op = self.plan.ops[index]
        if op.start > self.point:
            heappush(self._gated, (op.start, index))
        else:
            # The first report of the point or a later one.
            position = bisect_left(self._point_marks, op.start, key=itemgetter(0))
            self._marks[index] += [
                mark for _, mark in self._point_marks[position : position + 1]
            ]
            queues = self._ahead if self._undone[index] else self._ready
            heappush(queues[op.resource], (self._keys[index], index))
