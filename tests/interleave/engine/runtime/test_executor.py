"""The executor: the order of operations, and its state after failures."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.emulated import EmulatedStreams
from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.executor import (
    Executor,
    OperationFailed,
    deferred_interrupts,
)
from ebbtide.interleave.engine.runtime.plan_run import PlanRun
from ebbtide.interleave.model.plan import (
    BACKWARD,
    OTHER,
    RESOURCES,
    STEP,
    UPDATE,
    Op,
    Plan,
)
from tests.interleave.engine.plans import plans, workload_of
from tests.interleave.engine.twins import (
    Jitter,
    hasty_switches,
    no_thread_left,
    one_step,
)

SEEDS = st.integers(0, 2**32)


@contextmanager
def executing(
    perform: Callable[[Op], None], streams: EmulatedStreams | None = None
) -> Iterator[Executor]:
    """Yield an executor that performs operations of the device on streams, at the time
    at which they run."""
    with no_thread_left():
        used = streams or EmulatedStreams()

        def perform_or_issue(op: Op) -> None:
            if op.resource == "cpu":
                perform(op)
            else:
                used.submit(op.resource, lambda: perform(op))

        executor = Executor(perform_or_issue, used)
        try:
            yield executor
        finally:
            executor.close()
            used.close()


class Recovering(EmulatedStreams):
    """Streams that work again after a failure, so that a test can run more plans."""

    def recover(self) -> None:
        self._error = None


def cause(failure: OperationFailed) -> BaseException | None:
    """Return the error of an operation, on the CPU or on a stream."""
    error = failure.__cause__
    return error.__cause__ if isinstance(error, EngineError) else error


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return draw(plans(workload_of(sizes, draw(st.booleans()), draw(st.booleans()))))


def plan_of(*ops: Op) -> Plan:
    """Return a plan without any checks: the executor does not depend on what operations
    do."""
    return Plan("test", ops, 1, frozenset(), frozenset(), frozenset(), 0.0)


def op(resource: str, *after: int, start: float = OTHER, number: int = 0) -> Op:
    return Op("update", resource, number, 1, 0.0, start, after)  # type: ignore[arg-type]


class Log:
    """Log of the operations that started and ended, in order, as the operations see
    it."""

    def __init__(self, plan: Plan) -> None:
        self._index = {id(op): index for index, op in enumerate(plan.ops)}
        self.began: list[int] = []
        self.ended: list[int] = []
        self.trouble: list[str] = []
        self.reached = -1.0
        self._running: set[str] = set()

    def __call__(self, op: Op) -> None:
        index = self._index[id(op)]
        if op.resource in self._running:
            self.trouble.append(
                f"{index} runs at the same time as another on its resource"
            )
        self._running.add(op.resource)
        if not set(op.after) <= set(self.ended):
            self.trouble.append(f"{index} does not wait")
        if op.start > self.reached:
            self.trouble.append(f"{index} starts too early in the iteration")
        self.began.append(index)
        self.ended.append(index)
        self._running.discard(op.resource)


@given(any_plans(), SEEDS)
def test_executor__runs_random_plans_in_order(plan: Plan, seed: int) -> None:
    """Every guarantee on the order of operations is checked."""
    log, jitter = Log(plan), Jitter(seed)

    def perform(op: Op) -> None:
        jitter()
        log(op)
        jitter()

    with executing(perform) as executor, hasty_switches():
        executor.begin(plan)
        for point in (OTHER, 0.6, 1.0, 1.7, BACKWARD, 2.6, UPDATE, 3.6, STEP):
            jitter()
            log.reached = point
            executor.advance_to(point)
        run = executor.finish()
    assert not log.trouble
    assert sorted(log.began) == list(range(len(plan.ops)))
    assert all(run.done)
    check_times(run)


def check_times(run: PlanRun) -> None:
    """Check that each resource runs one operation at a time, and that operations start
    after their dependencies."""
    plan = run.plan
    for index, op in enumerate(plan.ops):
        assert run.starts[index] <= run.ends[index]
        assert all(run.ends[early] <= run.starts[index] for early in op.after)
    for resource in RESOURCES:
        own = sorted(
            (i for i, op in enumerate(plan.ops) if op.resource == resource),
            key=run.starts.__getitem__,
        )
        assert all(run.ends[one] <= run.starts[other] for one, other in pairwise(own))


def test_executor__starts_the_first_operation_that_is_ready() -> None:
    """The end of operation 0 makes its dependents ready at once; they run in the order
    of the plan."""
    gate = threading.Event()
    order: list[int] = []

    def perform(op: Op) -> None:
        if op.subgroup == 0:
            gate.wait(10)
        order.append(op.subgroup)

    ops = [
        op("cpu", number=0),
        op("cpu", number=1, start=UPDATE),
        *(op("cpu", 0, number=n) for n in (2, 3, 4)),
    ]
    with executing(perform) as executor:
        executor.begin(plan_of(*ops))
        executor.advance_to(OTHER)
        executor.advance_to(STEP)
        gate.set()
        executor.finish()
    assert order == [0, 1, 2, 3, 4]


def test_advance_to__starts_operations_at_their_point() -> None:
    began: list[float] = []
    with executing(lambda op: began.append(op.start)) as executor:
        executor.begin(
            plan_of(
                *(op("cpu", start=point) for point in (STEP, UPDATE, BACKWARD, OTHER))
            )
        )
        for count, point in enumerate((OTHER, BACKWARD, UPDATE, STEP), 1):
            executor.advance_to(point)
            # An earlier point has no effect.
            executor.advance_to(OTHER)
            until(lambda count=count: len(began) >= count)
            time.sleep(0.002)
            assert len(began) == count
        executor.finish()
    assert began == [OTHER, BACKWARD, UPDATE, STEP]


def test_finish__returns_at_once_for_a_plan_without_operations() -> None:
    with executing(lambda op: None) as executor:
        assert one_step(executor, plan_of()).done == []


def test_finish__needs_a_plan() -> None:
    with (
        executing(lambda op: None) as executor,
        pytest.raises(EngineError, match="no plan"),
    ):
        executor.finish()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@given(any_plans(), SEEDS, st.floats(0, 1), st.booleans())
def test_stop__waits_for_operations_in_flight_and_starts_no_other(
    plan: Plan, seed: int, share: float, again: bool
) -> None:
    log, jitter = Log(plan), Jitter(seed)
    log.reached = STEP
    with executing(jitter.around(log)) as executor:
        executor.begin(plan)
        executor.advance_to(STEP)
        until(lambda: len(log.began) >= int(share * len(plan.ops)))
        run = executor.stop()
        began = list(log.began)
        assert run is not None
        assert [index for index, done in enumerate(run.done) if done] == sorted(began)
        assert executor.stop() is None
        if again:
            log.ended.clear()
            assert all(one_step(executor, plan).done)
            began += range(len(plan.ops))
        time.sleep(0.001)
        assert sorted(log.began) == sorted(began)
    assert not log.trouble


@given(any_plans(), SEEDS, st.floats(0, 1))
def test_close__ends_all_threads_in_the_middle_of_a_plan(
    plan: Plan, seed: int, share: float
) -> None:
    log, jitter = Log(plan), Jitter(seed)
    log.reached = STEP
    with executing(jitter.around(log)) as executor:
        executor.begin(plan)
        executor.advance_to(STEP)
        until(lambda: len(log.began) >= int(share * len(plan.ops)))
    assert not log.trouble
    assert log.began == log.ended
    with pytest.raises(EngineError, match="closed"):
        executor.begin(plan)


def test_close__by_another_thread_ends_finish() -> None:
    """The garbage collector may close the executor on any thread."""
    begun, gate = threading.Event(), threading.Event()

    def perform(op: Op) -> None:
        begun.set()
        gate.wait(10)

    def close() -> None:
        begun.wait(10)
        threading.Timer(0.02, gate.set).start()
        executor.close()

    with executing(perform) as executor:
        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(EngineError, match="closed"):
            one_step(executor, plan_of(op("cpu"), op("cpu")))
        closer.join()


@pytest.mark.parametrize("holds_the_lock", [False, True])
def test_close__on_a_thread_of_the_executor_does_not_wait(holds_the_lock: bool) -> None:
    """The garbage collector runs at any allocation, in the code of the executor too."""

    def perform(op: Op) -> None:
        with executor._changed if holds_the_lock else nullcontext():
            executor.close()

    with executing(perform) as executor:
        with pytest.raises(EngineError, match="closed"):
            one_step(executor, plan_of(op("cpu"), op("cpu", 0)))
        until(lambda: not any(thread.is_alive() for thread in executor._threads))


@given(any_plans(), SEEDS, st.data())
def test_operation_failed__ends_the_run(
    plan: Plan, seed: int, data: st.DataObject
) -> None:
    """Operations in flight end, their dependents never start, the cause is raised, and
    the next run is complete."""
    broken = data.draw(st.integers(0, len(plan.ops) - 1))
    log, jitter, armed = Log(plan), Jitter(seed), [True]
    log.reached = STEP

    def perform(op: Op) -> None:
        jitter()
        if armed[0] and op is plan.ops[broken]:
            raise MemoryError("broken")
        log(op)
        jitter()

    streams = Recovering()
    with executing(perform, streams) as executor:
        with pytest.raises(OperationFailed) as failure:
            one_step(executor, plan, jitter)
        assert isinstance(cause(failure.value), MemoryError)
        done = failure.value.run.done
        # Of an operation on a device that failed meanwhile, nobody knows whether it was
        # done.
        assert {index for index, is_done in enumerate(done) if is_done} <= set(
            log.began
        )
        assert not done[broken]
        assert not any(
            index in log.began
            for index, op in enumerate(plan.ops)
            if broken in op.after
        )
        armed[0] = False
        streams.recover()
        log.ended.clear()
        assert all(one_step(executor, plan).done)
    assert not log.trouble


def test_finish__raises_the_first_of_earlier_failures() -> None:
    failed = threading.Event()

    def perform(op: Op) -> None:
        if op.subgroup == 1:
            failed.set()
            raise RuntimeError("first")
        failed.wait(10)
        time.sleep(0.005)
        raise RuntimeError("second")

    with executing(perform) as executor:
        executor.begin(
            plan_of(op("cpu", number=1), op("gpu", number=2), op("cpu", number=3))
        )
        executor.advance_to(OTHER)
        failed.wait(10)
        time.sleep(0.02)
        executor.advance_to(STEP)
        with pytest.raises(OperationFailed) as failure:
            executor.finish()
    assert str(cause(failure.value)) == "first"
    assert failure.value.run.done == [False, False, False]


def test_stop__drops_a_failure() -> None:
    def perform(op: Op) -> None:
        if op.subgroup == 1:
            raise RuntimeError("broken")

    with executing(perform) as executor:
        executor.begin(plan_of(op("cpu", number=1)))
        executor.advance_to(OTHER)
        run = executor.stop()
        assert run is not None
        assert one_step(executor, plan_of(op("cpu"))).done == [True]


def test_begin__releases_the_objects_of_a_failed_operation() -> None:
    """An error keeps alive what the operation worked with: gradients, device memory."""
    references: list[weakref.ref[threading.Event]] = []

    def perform(op: Op) -> None:
        worked_with = threading.Event()
        references.append(weakref.ref(worked_with))
        raise RuntimeError("broken")

    with executing(perform) as executor:
        with pytest.raises(OperationFailed):
            one_step(executor, plan_of(op("cpu")))
        one_step(executor, plan_of())
        gc.collect()
        assert [reference() for reference in references] == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_finish__completes_the_step_after_an_interrupt(fails: bool) -> None:
    """Ctrl-C while operations run: they read the inputs of the step, so the step is
    completed first."""
    main = threading.main_thread().ident
    if threading.get_ident() != main:
        pytest.skip("only the main thread gets signals")
    ended: list[int] = []

    def perform(op: Op) -> None:
        if not op.subgroup:
            # By then the main thread waits.
            time.sleep(0.1)
            signal.pthread_kill(main or 0, signal.SIGINT)
            time.sleep(0.05)
        elif fails:
            raise RuntimeError("broken")
        ended.append(op.subgroup)

    with executing(perform) as executor:
        executor.begin(plan_of(op("cpu"), op("gpu", 0, number=1)))
        executor.advance_to(STEP)
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            # As the runner calls it.
            executor.finish()
        assert ended == ([0] if fails else [0, 1])
        with pytest.raises(EngineError, match="no plan"):
            executor.finish()


def test_wait__ends_where_a_signal_handler_forks_at_any_line_of_it() -> None:
    """The handler waits for operations in flight: their end must not be missed by a
    wait that is about to begin."""
    for line in range(60):
        fork_within_a_wait(line)


def fork_within_a_wait(line: int) -> None:
    may_end, lines = threading.Event(), itertools.count()

    def fork_at_line(_frame: Any, event: str, _value: Any) -> Any:
        if event == "line" and next(lines) == line:
            may_end.set()
            with executor.paused():
                pass
        return fork_at_line

    # For lines that the wait does not reach before the operation ends.
    timer = threading.Timer(0.1, may_end.set)
    with executing(lambda _: may_end.wait() and None) as executor:
        executor.begin(plan_of(op("cpu")))
        executor.advance_to(OTHER)
        timer.start()
        sys.settrace(fork_at_line)
        try:
            assert executor.wait(lambda run: not run.remaining)
        finally:
            sys.settrace(None)
        executor.finish()
        timer.join()
