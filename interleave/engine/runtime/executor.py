"""Runs a plan for real: a thread for each resource takes the first of its operations that is ready, as the simulator
does. It decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.model.plan import RESOURCES, Op, Plan, Resource


@dataclass
class Run:
    """A plan under way. reached: the point of the iteration that the job has come to. begin_s: on the clock of
    time.perf_counter; starts, ends: since then."""

    plan: Plan
    begin_s: float
    starts: list[float]
    ends: list[float]
    done: list[bool]
    waits: list[int]
    following: list[list[int]]
    held: dict[int, list[int]] = field(default_factory=dict)
    # Operations that only wait for their point, by it.
    gated: list[tuple[float, int]] = field(default_factory=list)
    ready: dict[Resource, list[int]] = field(default_factory=lambda: {resource: [] for resource in RESOURCES})
    reached: float = -1.0
    left: int = 0


class Executor:
    """perform does one operation and returns when it is done; it is called by a thread for each resource. Calls of
    `begin`, `reach` and `finish` come from the training thread.

    An operation that raises ends the run: what is under way is waited for, nothing else begins, and the next call says
    so."""

    def __init__(self, perform: Callable[[Op], None]) -> None:
        self._perform = perform
        self._run: Run | None = None
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

    def begin(self, plan: Plan, held: Mapping[int, int] | None = None) -> None:
        """Begin an iteration: what waits for no point of it may run from now on. held: operations that also wait until
        something is provided, by its number."""
        count = len(plan.ops)
        following: list[list[int]] = [[] for _ in range(count)]
        for index, op in enumerate(plan.ops):
            for early in op.after:
                following[early].append(index)
        run = Run(
            plan=plan,
            begin_s=time.perf_counter(),
            starts=[0.0] * count,
            ends=[0.0] * count,
            done=[False] * count,
            waits=[len(op.after) for op in plan.ops],
            following=following,
            left=count,
        )
        for index, number in (held or {}).items():
            run.waits[index] += 1
            run.held.setdefault(number, []).append(index)
        with self._changed:
            if self._closed:
                raise EngineError("closed: no plan can begin")
            self._run = run
            self._error = None
            for index in range(count):
                if not run.waits[index]:
                    self._offer(run, index)

    def reach(self, point: float) -> None:
        """The job has come to a point of the iteration (see plan.py)."""
        with self._changed:
            run = self._run
            if run is None or point <= run.reached:
                return
            run.reached = point
            while run.gated and run.gated[0][0] <= point:
                _, index = heappop(run.gated)
                heappush(run.ready[run.plan.ops[index].resource], index)
            self._changed.notify_all()

    def provide(self, number: int) -> None:
        """What held operations waited for is there. Providing it once more does nothing."""
        with self._changed:
            run = self._run
            if run is None:
                return
            for index in run.held.pop(number, ()):
                run.waits[index] -= 1
                if not run.waits[index]:
                    self._offer(run, index)
            self._changed.notify_all()

    def finish(self) -> Run:
        """Wait until the run has ended, and return it. Raises what an operation raised."""
        with self._changed:
            run = self._run
            if run is None:
                raise EngineError("no plan is under way")

            def over() -> bool:
                return self._closed or not run.left or (self._error is not None and not self._busy)

            try:
                self._changed.wait_for(over)
            finally:
                # After an interrupt (Ctrl-C) too: a step that is half done would be lost.
                self._changed.wait_for(over)
                self._run = None
            if self._error is not None:
                raise Stopped(run) from self._error
            if run.left:
                raise EngineError("closed while a plan was under way")
            return run

    def stop(self) -> Run | None:
        """Wait for what is under way and drop the rest; what was there, if anything."""
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
        # The garbage collector may call this on one of them, in the middle of anything, with the lock held.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _offer(self, run: Run, index: int) -> None:
        op = run.plan.ops[index]
        if op.point > run.reached:
            heappush(run.gated, (op.point, index))
        else:
            heappush(run.ready[op.resource], index)

    def _work(self, resource: Resource) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next(resource))
                if self._closed:
                    return
                run = self._run
                assert run is not None
                index = heappop(run.ready[resource])
                self._busy += 1
            self._do(run, index)

    def _do(self, run: Run, index: int) -> None:
        run.starts[index] = time.perf_counter() - run.begin_s
        # Gone when this returns: an error keeps alive what the operation worked with.
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
                self._ended(run, index)
            self._changed.notify_all()

    def _next(self, resource: Resource) -> bool:
        run = self._run
        return run is not None and self._error is None and bool(run.ready[resource])

    def _ended(self, run: Run, index: int) -> None:
        run.done[index] = True
        run.left -= 1
        for after in run.following[index]:
            run.waits[after] -= 1
            if not run.waits[after]:
                self._offer(run, after)


class Stopped(EngineError):
    """An operation raised; the cause says what. run: what was done until then."""

    def __init__(self, run: Run) -> None:
        super().__init__("an operation of the plan failed")
        self.run = run
