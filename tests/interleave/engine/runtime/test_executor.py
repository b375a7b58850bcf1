"""The executor: the order in which things run, and what is left when something breaks off."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.runtime.executor import Executor, Run, Stopped
from ebbtide.interleave.model.plan import BACKWARD, OTHER, RESOURCES, STEP, UPDATE, Op, Plan
from tests.interleave.engine.plans import plans, workload_of
from tests.interleave.engine.twins import Jitter, hasty_switches, no_thread_left, one_step

SEEDS = st.integers(0, 2**32)


@contextmanager
def executing(perform: Callable[[Op], None]) -> Iterator[Executor]:
    with no_thread_left():
        executor = Executor(perform)
        try:
            yield executor
        finally:
            executor.close()


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return draw(plans(workload_of(sizes, draw(st.booleans()), draw(st.booleans()))))


def plan_of(*ops: Op) -> Plan:
    """Not a sound one: the executor does not care what operations do."""
    return Plan("test", ops, 1, frozenset(), frozenset(), frozenset(), 0.0)


def op(resource: str, *after: int, point: float = OTHER, number: int = 0) -> Op:
    return Op("update", resource, number, 1, 0.0, point, after)  # type: ignore[arg-type]


class Log:
    """What began and ended, in order, as the operations themselves see it."""

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
            self.trouble.append(f"{index} runs beside another on its resource")
        self._running.add(op.resource)
        if not set(op.after) <= set(self.ended):
            self.trouble.append(f"{index} does not wait")
        if op.point > self.reached:
            self.trouble.append(f"{index} begins too early in the iteration")
        self.began.append(index)
        self.ended.append(index)
        self._running.discard(op.resource)


@given(any_plans(), SEEDS)
def test_order_of_random_plans(plan: Plan, seed: int) -> None:
    """Run a plan and look at all that an executor promises of the order."""
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
            executor.reach(point)
        run = executor.finish()
    assert not log.trouble
    assert sorted(log.began) == list(range(len(plan.ops)))
    assert all(run.done)
    check_times(run)


def check_times(run: Run) -> None:
    """One at a time on each resource, and nothing begins before what it waits for has ended."""
    plan = run.plan
    for index, op in enumerate(plan.ops):
        assert run.starts[index] <= run.ends[index]
        assert all(run.ends[early] <= run.starts[index] for early in op.after)
    for resource in RESOURCES:
        own = sorted((i for i, op in enumerate(plan.ops) if op.resource == resource), key=run.starts.__getitem__)
        assert all(run.ends[one] <= run.starts[other] for one, other in pairwise(own))


def test_the_first_of_the_plan_that_is_ready_comes_first() -> None:
    """3, which everything waits for, makes 0's followers ready in any order; they run in the plan's."""
    gate = threading.Event()
    order: list[int] = []

    def perform(op: Op) -> None:
        if op.subgroup == 0:
            gate.wait(10)
        order.append(op.subgroup)

    ops = [op("cpu", number=0), op("cpu", number=1, point=UPDATE), *(op("cpu", 0, number=n) for n in (2, 3, 4))]
    with executing(perform) as executor:
        executor.begin(plan_of(*ops))
        executor.reach(OTHER)
        executor.reach(STEP)
        gate.set()
        executor.finish()
    assert order == [0, 1, 2, 3, 4]


def test_what_is_ready_does_not_wait_for_what_is_not() -> None:
    """An operation later in the plan goes first where the one before it has to wait."""
    order: list[int] = []
    other = threading.Event()

    def perform(op: Op) -> None:
        if op.resource == "gpu":
            other.wait(10)
        elif op.subgroup == 2:
            other.set()
        order.append(op.subgroup)

    with executing(perform) as executor:
        one_step(executor, plan_of(op("gpu", number=0), op("cpu", 0, number=1), op("cpu", number=2)))
    assert order == [2, 0, 1]


def test_nothing_begins_before_its_point() -> None:
    began: list[float] = []
    with executing(lambda op: began.append(op.point)) as executor:
        executor.begin(plan_of(*(op("cpu", point=point) for point in (STEP, UPDATE, BACKWARD, OTHER))))
        for count, point in enumerate((OTHER, BACKWARD, UPDATE, STEP), 1):
            executor.reach(point)
            # Going back in the iteration changes nothing.
            executor.reach(OTHER)
            until(lambda count=count: len(began) >= count)
            time.sleep(0.002)
            assert len(began) == count
        executor.finish()
    assert began == [OTHER, BACKWARD, UPDATE, STEP]


def test_a_plan_without_operations_is_over_at_once() -> None:
    with executing(lambda op: None) as executor:
        assert one_step(executor, plan_of()).done == []


def test_finish_needs_a_plan() -> None:
    with executing(lambda op: None) as executor, pytest.raises(EngineError, match="no plan"):
        executor.finish()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@given(any_plans(), SEEDS, st.floats(0, 1), st.booleans())
def test_stop_waits_for_what_is_under_way_and_begins_nothing_else(
    plan: Plan, seed: int, share: float, again: bool
) -> None:
    log, jitter = Log(plan), Jitter(seed)
    log.reached = STEP
    with executing(jitter.around(log)) as executor:
        executor.begin(plan)
        executor.reach(STEP)
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
def test_close_in_the_middle_ends_every_thread(plan: Plan, seed: int, share: float) -> None:
    log, jitter = Log(plan), Jitter(seed)
    log.reached = STEP
    with executing(jitter.around(log)) as executor:
        executor.begin(plan)
        executor.reach(STEP)
        until(lambda: len(log.began) >= int(share * len(plan.ops)))
    assert not log.trouble
    assert log.began == log.ended
    with pytest.raises(EngineError, match="closed"):
        executor.begin(plan)


def test_close_by_another_thread_ends_the_wait() -> None:
    """The collector may close from anywhere."""
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
def test_close_on_a_thread_of_its_own_waits_for_none(holds_the_lock: bool) -> None:
    """The collector runs wherever something is allocated, in the executor's own code too."""

    def perform(op: Op) -> None:
        with executor._changed if holds_the_lock else nullcontext():
            executor.close()

    with executing(perform) as executor:
        with pytest.raises(EngineError, match="closed"):
            one_step(executor, plan_of(op("cpu"), op("cpu", 0)))
        until(lambda: not any(thread.is_alive() for thread in executor._threads))


@given(any_plans(), SEEDS, st.data())
def test_an_operation_that_raises_ends_the_run(plan: Plan, seed: int, data: st.DataObject) -> None:
    """What was under way is waited for, what comes after it never begins, the cause is told, the next run is whole."""
    broken = data.draw(st.integers(0, len(plan.ops) - 1))
    log, jitter, armed = Log(plan), Jitter(seed), [True]
    log.reached = STEP

    def perform(op: Op) -> None:
        jitter()
        if armed[0] and op is plan.ops[broken]:
            raise MemoryError("broken")
        log(op)
        jitter()

    with executing(perform) as executor:
        with pytest.raises(Stopped) as stopped:
            one_step(executor, plan, jitter)
        assert isinstance(stopped.value.__cause__, MemoryError)
        done = stopped.value.run.done
        assert sorted(log.began) == [index for index, is_done in enumerate(done) if is_done]
        assert not done[broken]
        assert not any(done[index] for index, op in enumerate(plan.ops) if broken in op.after)
        armed[0] = False
        log.ended.clear()
        assert all(one_step(executor, plan).done)
    assert not log.trouble


def test_a_failure_while_nobody_waits_is_told_by_the_next_finish() -> None:
    failed = threading.Event()

    def perform(op: Op) -> None:
        if op.subgroup == 1:
            failed.set()
            raise RuntimeError("first")
        failed.wait(10)
        time.sleep(0.005)
        raise RuntimeError("second")

    with executing(perform) as executor:
        executor.begin(plan_of(op("cpu", number=1), op("gpu", number=2), op("cpu", number=3)))
        executor.reach(OTHER)
        failed.wait(10)
        time.sleep(0.02)
        executor.reach(STEP)
        with pytest.raises(Stopped) as stopped:
            executor.finish()
    assert str(stopped.value.__cause__) == "first"
    assert stopped.value.run.done == [False, False, False]


def test_stop_drops_a_failure() -> None:
    def perform(op: Op) -> None:
        if op.subgroup == 1:
            raise RuntimeError("broken")

    with executing(perform) as executor:
        executor.begin(plan_of(op("cpu", number=1)))
        executor.reach(OTHER)
        run = executor.stop()
        assert run is not None
        assert one_step(executor, plan_of(op("cpu"))).done == [True]


def test_a_failure_keeps_nothing_alive_once_another_plan_begins() -> None:
    """An error holds on to what the operation worked with: gradients, room on the device."""
    held: list[weakref.ref[threading.Event]] = []

    def perform(op: Op) -> None:
        worked_with = threading.Event()
        held.append(weakref.ref(worked_with))
        raise RuntimeError("broken")

    with executing(perform) as executor:
        with pytest.raises(Stopped):
            one_step(executor, plan_of(op("cpu")))
        one_step(executor, plan_of())
        gc.collect()
        assert [found() for found in held] == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupted_wait_ends_after_the_step(fails: bool) -> None:
    """Ctrl-C while operations run: they read what the step gave them, so the step comes to its end first."""
    main = threading.main_thread().ident
    if threading.get_ident() != main:
        pytest.skip("signals come to the main thread alone")
    ended: list[int] = []

    def perform(op: Op) -> None:
        if not op.subgroup:
            # The main thread waits by now.
            time.sleep(0.1)
            signal.pthread_kill(main or 0, signal.SIGINT)
            time.sleep(0.05)
        elif fails:
            raise RuntimeError("broken")
        ended.append(op.subgroup)

    with executing(perform) as executor:
        executor.begin(plan_of(op("cpu"), op("gpu", 0, number=1)))
        executor.reach(STEP)
        with pytest.raises(KeyboardInterrupt):
            executor.finish()
        assert ended == ([0] if fails else [0, 1])
        with pytest.raises(EngineError, match="no plan"):
            executor.finish()
