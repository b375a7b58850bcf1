"""Executes plans.

A thread for each resource starts the first operation that is ready, as the simulator
does.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from ebbtide.interleave.engine.devices.device import Mark, Stream, Streams
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.forks import ForkCondition
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.model.operations import DEVICE_RESOURCES, Resource, split_lane
from ebbtide.interleave.model.plan import RESOURCES, STEP, Op, Plan

# Operations of a stream: the running and the next one. With more the order would be
# fixed too early.
_DEPTH = 2
# Those whose handlers jobs replace by functions that may raise.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Executor:
    """Executes plans on a thread for each lane: the core's lanes, and the lanes of the
    plans that it has begun.

    Operations on the CPU and of storage are performed by their thread. Those on the
    device are issued to streams, which wait for one another; their thread takes their
    times from marks. The training thread calls `begin`, `advance_to` and `finish`.
    After an operation that raises no other starts, and `finish` raises. Without memory
    (`fits`) one waits for others; if there is nothing to wait for, it is performed
    nevertheless.
    """

    def __init__(
        self,
        perform: Callable[[Op], None],
        streams: Streams,
        fits: Callable[[Op], bool] = lambda op: True,
        end: Callable[[Op], None] = lambda op: None,
    ) -> None:
        self._perform = perform
        self._streams = streams
        self._fits = fits
        self._end = end
        self._run: PlanRun | None = None
        self._changed = ForkCondition()
        self._busy = 0
        self._error: BaseException | None = None
        self._closed = False
        self._pauses = 0
        self._lanes: list[Resource] = list(RESOURCES)
        # The plan that was begun last, whose lanes are among these.
        self._lanes_of: Plan | None = None
        # One for each of the lanes. They start when there is something to do, in a
        # forked child once more.
        self._threads: list[threading.Thread] = []

    def begin(
        self,
        plan: Plan,
        inputs: Mapping[int, int] | None = None,
        begin_s: float | None = None,
    ) -> None:
        """Begin an iteration.

        Operations that wait for no point of the iteration may run from now on.
        `inputs`: the input that an operation also waits for, as a number: see
        `mark_available`. `begin_s`: as for `PlanRun`.
        """
        run = PlanRun(plan, inputs or {}, begin_s)
        with self._changed:
            if self._closed:
                raise EngineError("the executor is closed: no plan can begin")
            if plan is not self._lanes_of:
                self._lanes = [
                    *dict.fromkeys([*self._lanes, *(op.resource for op in plan.ops)])
                ]
                self._lanes_of = plan
            self._run = run
            self._error = None

    def advance_to(self, point: float) -> None:
        """Report that the job's work is issued up to a point of the iteration.

        The calling thread has issued it (see plan.py).
        """
        with self._changed:
            run = self._run
            if run is None or point <= run.point:
                return
            run.advance_to(point, lambda: self._streams.record("job"))
            self._wake()

    def mark_available(self, number: int, marks: Sequence[Mark] = ()) -> None:
        """Report that an input of operations is available.

        For streams, it is when they have passed marks.

        A second report of the same input has no effect."""
        with self._changed:
            run = self._run
            if run is None:
                return
            run.mark_available(number, marks)
            self._wake()

    def renew(
        self, operations: Collection[int], stale: Collection[int], mark: Mark
    ) -> None:
        """Let operations that are not done wait for a mark, too, and stale ones run
        again after it. Call it while this is paused."""
        with self._changed:
            run = self._run
            if run is None:
                return
            for index in operations:
                if index in stale or not run.done[index]:
                    run.add_mark(index, mark)
            run.repeat(stale)

    def repeat(self, indices: Collection[int]) -> None:
        """Let operations on the CPU run again that have begun. Nothing that follows
        them may have."""
        with self._changed:
            if indices and self._run is not None:
                self._run.repeat(indices)
                self._wake()

    def wait(self, is_enough: Callable[[PlanRun], bool]) -> bool:
        """Wait until enough operations of the run are done.

        False: one failed, or this was closed, and `finish` raises.
        """
        with self._changed:
            run = self._run
            if run is None:
                return True
            self._wake()
            self._changed.wait_for(
                lambda: self._closed or self._error is not None or is_enough(run)
            )
            return is_enough(run) and self._error is None

    def finish(self) -> PlanRun:
        """Wait until the run has ended, and return it. Raises OperationFailed if an
        operation raised, and EngineError if no plan is running or the executor was
        closed."""
        with self._changed:
            run = self._run
            if run is None:
                raise EngineError(
                    "the executor was closed" if self._closed else "no plan is running"
                )

            def has_ended() -> bool:
                return (
                    self._closed
                    or not run.remaining
                    or (self._error is not None and not self._busy)
                )

            self._wake()
            self._changed.wait_for(has_ended)
            self._run = None
            if self._error is not None:
                raise OperationFailed(run) from self._error
            if run.remaining:
                raise EngineError("the executor was closed while a plan was running")
            return run

    def stop(self) -> PlanRun | None:
        """Wait for the operations in flight and drop the others."""
        with self._changed:
            run, self._run = self._run, None
            self._changed.wait_for(lambda: not self._busy)
            return run

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Start no operation meanwhile; those in flight end first. A signal handler may
        do so inside."""
        try:
            self.before_fork()
            yield
        finally:
            self.after_fork(False)

    def before_fork(self) -> None:
        with self._changed:
            self._pauses += 1
            if threading.current_thread() not in self._threads:
                self._changed.wait_for(lambda: not self._busy)

    def after_fork(self, in_child: bool) -> None:
        with self._changed:
            self._pauses -= 1
            if in_child:
                self._threads, self._busy = [], 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, after the operations in flight."""
        with self._changed:
            self._closed = True
            self._run = None
            self._changed.notify_all()
        # The garbage collector may call this on one of the threads, at any time, with
        # the lock acquired.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()

    def _wake(self) -> None:
        """Let the threads look for operations. The lock is acquired."""
        for lane in [] if self._closed else self._lanes[len(self._threads) :]:
            thread = threading.Thread(
                target=self._serve,
                args=(lane,),
                name=f"ebbtide-{split_lane(lane)[0]}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _serve(self, lane: Resource) -> None:
        with self._streams.thread_setup():
            self._work(lane)

    def _work(self, lane: Resource) -> None:
        resource, _ = split_lane(lane)
        in_flight: deque[_Issued] = deque()
        while True:
            index = None
            with self._changed:
                while not self._closed:
                    index = self._take(lane) if len(in_flight) < _DEPTH else None
                    if index is not None or in_flight:
                        break
                    self._changed.wait()
                if index is not None:
                    self._busy += 1
                elif not in_flight:
                    return
                run = self._run
            if index is None:
                self._wait_for(in_flight.popleft())
            elif resource in DEVICE_RESOURCES:
                assert run is not None
                issued = self._issue(run, index, cast(Stream, resource))
                if issued is not None:
                    in_flight.append(issued)
            else:
                assert run is not None
                self._perform_here(run, index)
            run = None

    def _take(self, lane: Resource) -> int | None:
        run = self._run
        if run is None or self._error is not None or self._pauses:
            return None
        index = run.take(lane, self._fits)
        if index is None and self._is_stalled(run):
            index = run.take(lane, lambda op: True)
        return index

    def _is_stalled(self, run: PlanRun) -> bool:
        """Return whether no operation can start because of memory.

        Nothing will release any then.
        """
        if self._busy or run.point < STEP or run.waits_for_the_job:
            return False
        return not any(run.can_take(lane, self._fits) for lane in self._lanes)

    def _perform_here(self, run: PlanRun, index: int) -> None:
        start_s = time.perf_counter()
        # A local variable, which is gone when this returns: an error keeps alive what
        # the operation worked with.
        error: BaseException | None = None
        try:
            self._perform(run.plan.ops[index])
        except BaseException as reason:
            error = reason
        self._record_end(run, index, start_s, time.perf_counter(), error)

    def _issue(self, run: PlanRun, index: int, resource: Stream) -> _Issued | None:
        """Issue an operation to a stream. Return None if it raised; what it had issued
        by then is done."""
        error: BaseException | None = None
        end: Mark | None = None
        try:
            with self._changed:
                marks = run.marks_before(index)
            self._streams.wait(resource, marks)
            start = self._streams.record(resource)
            try:
                self._perform(run.plan.ops[index])
            finally:
                end = self._streams.record(resource)
        except BaseException as reason:
            error = reason
        if error is None:
            assert end is not None
            with self._changed:
                run.issue(index, end)
                self._changed.notify_all()
            return _Issued(run, index, start, end)
        if end is not None:
            try:
                end.synchronize()
            except Exception as reason:
                error = reason
        self._record_end(run, index, 0.0, 0.0, error)
        return None

    def _wait_for(self, issued: _Issued) -> None:
        error: BaseException | None = None
        start_s = end_s = 0.0
        try:
            issued.end.synchronize()
            start_s, end_s = issued.start.time_s, issued.end.time_s
        except BaseException as reason:
            error = reason
        self._record_end(issued.run, issued.index, start_s, end_s, error)

    def _record_end(
        self,
        run: PlanRun,
        index: int,
        start_s: float,
        end_s: float,
        error: BaseException | None,
    ) -> None:
        if error is None:
            try:
                self._end(run.plan.ops[index])
            except BaseException as reason:
                # A thread that ended here would let `finish` wait for ever.
                error = reason
        with self._changed:
            self._busy -= 1
            if error is not None:
                self._error = self._error or error
            else:
                run.complete(index, start_s, end_s)
            self._changed.notify_all()


@dataclass
class _Issued:
    """An operation that was issued to a stream."""

    run: PlanRun
    index: int
    start: Mark
    end: Mark


class OperationFailed(EngineError):
    """An operation of a plan raised; the cause is its error. The run says which
    operations were done."""

    def __init__(self, run: PlanRun) -> None:
        super().__init__("an operation of the plan failed")
        self.run = run


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Return a context for work that must not be left half done.

    Handlers of signals that arrive run at its end. Python runs them on the main thread,
    so on any other one there is nothing to defer.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.enter_context(_deferred(number, handler))
        yield


@contextmanager
def _deferred(
    number: int, handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    frames: list[FrameType | None] = []
    try:
        signal.signal(number, lambda _, frame: frames.append(frame))
        yield
    finally:
        signal.signal(number, handler)
        for frame in frames:
            handler(number, frame)
