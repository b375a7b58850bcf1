"""Executes plans: a thread for each resource takes the first of its operations that is ready, as the simulator does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.plan import RESOURCES, Op, Plan, Resource


@dataclass
class PlanRun:
    """One execution of a plan. All lists are indexed by operation.

    Attributes:
        plan: The plan.
        begin_s: Start of the run, on the clock of time.perf_counter.
        starts: Start of each operation, in seconds since `begin_s`.
        ends: End of each operation, in seconds since `begin_s`.
        done: Whether each operation has ended without an error.
        dependency_counts: Number of operations and inputs that each operation still waits for.
        dependents: Operations that wait for each operation.
        blocked: Operations that wait for an input, by the number of the input.
        gated: Operations that only wait for their point of the iteration, as a heap of (point, operation).
        ready: Operations that can start, as a heap for each resource.
        point: The point of the iteration that the job has reached.
        remaining: Number of operations that have not ended.
    """

    plan: Plan
    begin_s: float
    starts: list[float]
    ends: list[float]
    done: list[bool]
    dependency_counts: list[int]
    dependents: list[list[int]]
    blocked: dict[int, list[int]] = field(default_factory=dict)
    gated: list[tuple[float, int]] = field(default_factory=list)
    ready: dict[Resource, list[int]] = field(default_factory=lambda: {resource: [] for resource in RESOURCES})
    point: float = -1.0
    remaining: int = 0


class Executor:
    """Executes plans on a thread for each resource.

    `begin`, `advance_to` and `finish` are called by the training thread. An operation that raises ends the run: the
    operations in flight end, no other operation starts, and `finish` raises.

    Args:
        perform: Performs one operation and returns when it is done. The threads of the executor call it.
    """

    def __init__(self, perform: Callable[[Op], None]) -> None:
        self._perform = perform
        self._run: PlanRun | None = None
        self._changed = threading.Condition()
        self._busy = 0
        self._error: BaseException | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(resource,), name=f"ebbtide-{resource}", daemon=True)
            for resource in RESOURCES
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, plan: Plan, inputs: Mapping[int, int] | None = None) -> None:
        """Begin an iteration: operations that wait for no point of it may run from now on.

        Args:
            plan: The plan to run.
            inputs: The input that an operation also waits for, as a number: see `mark_available`.

        Raises:
            EngineError: If the executor is closed.
        """
        count = len(plan.ops)
        dependents: list[list[int]] = [[] for _ in range(count)]
        for index, op in enumerate(plan.ops):
            for dependency in op.after:
                dependents[dependency].append(index)
        run = PlanRun(
            plan=plan,
            begin_s=time.perf_counter(),
            starts=[0.0] * count,
            ends=[0.0] * count,
            done=[False] * count,
            dependency_counts=[len(op.after) for op in plan.ops],
            dependents=dependents,
            remaining=count,
        )
        for index, number in (inputs or {}).items():
            run.dependency_counts[index] += 1
            run.blocked.setdefault(number, []).append(index)
        with self._changed:
            if self._closed:
                raise EngineError("the executor is closed: no plan can begin")
            self._run = run
            self._error = None
            for index in range(count):
                if not run.dependency_counts[index]:
                    self._enqueue(run, index)

    def advance_to(self, point: float) -> None:
        """Report that the job has reached a point of the iteration (see plan.py)."""
        with self._changed:
            run = self._run
            if run is None or point <= run.point:
                return
            run.point = point
            while run.gated and run.gated[0][0] <= point:
                _, index = heappop(run.gated)
                heappush(run.ready[run.plan.ops[index].resource], index)
            self._changed.notify_all()

    def mark_available(self, number: int) -> None:
        """Report that an input of operations is available; a second report of the same input has no effect."""
        with self._changed:
            run = self._run
            if run is None:
                return
            for index in run.blocked.pop(number, ()):
                run.dependency_counts[index] -= 1
                if not run.dependency_counts[index]:
                    self._enqueue(run, index)
            self._changed.notify_all()

    def finish(self) -> PlanRun:
        """Wait until the run has ended, and return it.

        Raises:
            OperationFailed: If an operation raised; the error of the operation is its cause.
            EngineError: If no plan is running, or the executor was closed.
        """
        with self._changed:
            run = self._run
            if run is None:
                raise EngineError("no plan is running")

            def has_ended() -> bool:
                return self._closed or not run.remaining or (self._error is not None and not self._busy)

            try:
                self._changed.wait_for(has_ended)
            finally:
                # Also after an interrupt (Ctrl-C): a step that is half done would be lost.
                self._changed.wait_for(has_ended)
                self._run = None
            if self._error is not None:
                raise OperationFailed(run) from self._error
            if run.remaining:
                raise EngineError("the executor was closed while a plan was running")
            return run

    def stop(self) -> PlanRun | None:
        """Wait for the operations in flight and drop the others.

        Returns:
            The run, or None if no plan was running.
        """
        with self._changed:
            run, self._run = self._run, None
            self._changed.wait_for(lambda: not self._busy)
            return run

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._run = None
            self._changed.notify_all()
        # The garbage collector may call this on one of the threads, at any time, with the lock acquired.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _enqueue(self, run: PlanRun, index: int) -> None:
        op = run.plan.ops[index]
        if op.point > run.point:
            heappush(run.gated, (op.point, index))
        else:
            heappush(run.ready[op.resource], index)

    def _work(self, resource: Resource) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_ready(resource))
                if self._closed:
                    return
                run = self._run
                assert run is not None
                index = heappop(run.ready[resource])
                self._busy += 1
            self._execute(run, index)

    def _execute(self, run: PlanRun, index: int) -> None:
        run.starts[index] = time.perf_counter() - run.begin_s
        # A local variable, which is gone when this returns: an error keeps alive what the operation worked with.
        error: BaseException | None = None
        try:
            self._perform(run.plan.ops[index])
        except BaseException as reason:
            error = reason
        run.ends[index] = time.perf_counter() - run.begin_s
        with self._changed:
            self._busy -= 1
            if error is not None:
                self._error = self._error or error
            else:
                self._complete(run, index)
            self._changed.notify_all()

    def _has_ready(self, resource: Resource) -> bool:
        run = self._run
        return run is not None and self._error is None and bool(run.ready[resource])

    def _complete(self, run: PlanRun, index: int) -> None:
        run.done[index] = True
        run.remaining -= 1
        for dependent in run.dependents[index]:
            run.dependency_counts[dependent] -= 1
            if not run.dependency_counts[dependent]:
                self._enqueue(run, dependent)


class OperationFailed(EngineError):
    """An operation of a plan raised; the cause is its error.

    Attributes:
        run: The run, with the operations that were done.
    """

    def __init__(self, run: PlanRun) -> None:
        super().__init__("an operation of the plan failed")
        self.run = run
