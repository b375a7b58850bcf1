"""Failures while a plan runs: the step is completed with the bits of the reference, or
an error says that it was not.

Nothing hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRule
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Executor, OperationFailed
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.plan import OTHER, Op, Plan
from ebbtide.interleave.model.workload import Workload
from tests.interleave.engine.plans import (
    PLACEMENTS,
    device_bytes,
    make,
    plans,
    workload_of,
)
from tests.interleave.engine.states import arguments
from tests.interleave.engine.twins import (
    Jitter,
    JitteryDevice,
    Twin,
    hasty_switches,
    no_thread_left,
    one_step,
    place,
    twins,
)

SEEDS = st.integers(0, 2**32)
# The calls that can fail: updates on CPU and GPU, copies, allocations on the device and
# on the host.
UPDATES = ("kernel", "update")
CALLS = (*UPDATES, "h2d", "d2h", "state", "host")
WHEN = ("before", "half", "after")


@dataclass
class Fault:
    """A failure of one kind of call: after `number` calls that succeed; with `always`,
    every later call fails too."""

    call: str
    number: int
    when: str = "before"
    always: bool = False
    struck: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, call: str) -> bool:
        with self._lock:
            if call != self.call or (self.struck and not self.always):
                return False
            self.number -= 1
            self.struck = self.number < 0
            return self.struck


class Broken(Exception):
    pass


def part(tensors: tuple[torch.Tensor, ...], when: str) -> list[torch.Tensor]:
    """Return the parts of the tensors that are processed before the failure."""
    length = {
        "before": 0,
        "half": len(tensors[0].reshape(-1)) // 2,
        "after": len(tensors[0].reshape(-1)),
    }[when]
    return [tensor.reshape(-1)[:length] for tensor in tensors]


class FaultyKernel(CpuKernel):
    def __init__(self) -> None:
        super().__init__(1)
        self.fault = Fault("none", 0)

    def update_ranges(
        self,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        ranges: Iterable[tuple[int, int, Scalars]],
        share: float = 1.0,
        rule: UpdateRule = ADAMW,
    ) -> None:
        for begin, end, scalars, *_ in ranges:
            if self.fault.strikes("kernel"):
                done = len(part((grad[begin:end],), self.fault.when)[0])
                super().update_ranges(
                    grad, state, None, [(begin, begin + done, scalars)], share, rule
                )
                raise Broken
            super().update_ranges(
                grad, state, out, [(begin, end, scalars)], share, rule
            )


class FaultyDevice(JitteryDevice):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(jitter)
        self.fault = Fault("none", 0)

    def copy(
        self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        if self.fault.strikes(direction):
            for source, target in pairs:
                begun = part((source, target), self.fault.when)
                super().copy(direction, [(begun[0], begun[1])])
            raise Broken
        super().copy(direction, pairs)

    def update(self, updates: Sequence[TensorUpdate]) -> None:
        for update in updates:
            if self.fault.strikes("update"):
                tensors = part(
                    (update.grad, *update.state, update.out), self.fault.when
                )
                super().update(
                    [TensorUpdate(*arguments(tensors), update.scalars, update.rule)]
                )
                raise Broken
            super().update([update])

    def allocate_state(self, params: int, rows: int = 3) -> torch.Tensor:
        if self.fault.strikes("state"):
            raise DeviceMemoryError("no room")
        return super().allocate_state(params, rows)

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        if self.fault.strikes("host"):
            raise EngineError("the host has no memory left")
        return super().allocate_host(shape, dtype, pinned)


@dataclass
class Bench:
    engine: Engine
    device: FaultyDevice
    kernel: FaultyKernel
    workload: Workload

    def arm(self, fault: Fault) -> None:
        self.device.fault = self.kernel.fault = fault


@contextlib.contextmanager
def bench(
    twin: Twin, seed: int = 0, clipping: bool = True, stay: bool = True
) -> Iterator[Bench]:
    """Yield an engine with the state of the twin; check that closing it ends all
    threads and releases all memory."""
    jitter = Jitter(seed, 2e-4)
    width = max(subgroup.dtype.itemsize for subgroup in twin.subgroups)
    with no_thread_left(), hasty_switches():
        device, kernel = FaultyDevice(jitter), FaultyKernel()
        engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
        try:
            twin.begin(engine.store)
            yield Bench(
                engine, device, kernel, workload_of(twin.sizes, clipping, stay, width)
            )
        finally:
            engine.close()
            device.close()
            kernel.close()
    assert device.used_bytes == engine.store.host_bytes == 0


def check_completion(twin: Twin, plan: Plan, workload: Workload, seed: int) -> None:
    """Check that a step is completed if an operation raises before it starts, for each
    operation."""
    jitter = Jitter(seed, 1e-4)
    device, kernel = JitteryDevice(jitter), CpuKernel(1)
    store = Store(twin.subgroups, device, kernel)
    twin.begin(store)
    broken: list[Op] = []

    def perform(op: Op) -> None:
        jitter()
        if broken and op is broken[0]:
            raise Broken
        store.perform(op)

    with no_thread_left(), hasty_switches():
        executor = Executor(perform, device, store.fits, store.end)
        try:
            for op in plan.ops:
                broken[:] = [op]
                place(store, plan, workload)
                store.update = twin.update(
                    streamed=not workload.gradients_held_until_step
                )
                with pytest.raises(OperationFailed):
                    one_step(executor, plan, jitter)
                store.complete()
                assert device.used_bytes == 0
                twin.check(store)
            broken.clear()
            place(store, plan, workload)
            store.update = twin.update()
            one_step(executor, plan, jitter)
            twin.check(store)
        finally:
            executor.close()
            store.release()
            device.close()
            kernel.close()


@given(twins(), st.booleans(), st.booleans(), st.data(), SEEDS)
def test_complete__finishes_a_step_after_any_operation_failed(
    twin: Twin, clipping: bool, stay: bool, data: st.DataObject, seed: int
) -> None:
    workload = workload_of(twin.sizes, clipping, stay)
    check_completion(twin, data.draw(plans(workload)), workload, seed)


def failure_of(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


@given(twins(), st.data(), SEEDS)
def test_engine__survives_a_failure_of_any_hardware_call(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    """A call of the hardware fails before, in the middle of or after its work."""
    fault = Fault(
        data.draw(st.sampled_from(CALLS)),
        data.draw(st.integers(0, 30)),
        data.draw(st.sampled_from(WHEN)),
    )
    stay = data.draw(st.booleans())
    clipping = not stay or data.draw(st.booleans())
    with bench(twin, seed, clipping, stay) as setup:
        setup.arm(fault)
        failed = 0
        for _ in range(3):
            plan = data.draw(plans(setup.workload))
            try:
                setup.engine.set_plan(plan, setup.workload)
            except (Broken, EngineError):
                assert fault.struck
                failed += 1
                setup.engine.set_plan(plan, setup.workload)
            for _ in range(2):
                failure = failure_of(
                    lambda: twin.step(
                        setup.engine, offloaded_share=0.0 if stay else 0.7
                    )
                )
                if isinstance(failure, EngineError) and not isinstance(
                    failure, OperationFailed
                ):
                    assert fault.call in UPDATES
                    assert "failed midway" in str(failure)
                    return
                if failure is not None:
                    assert fault.struck
                    assert fault.call not in UPDATES
                    assert isinstance(failure.__cause__, Broken | DeviceMemoryError)
                    failed += 1
                twin.check()
            setup.engine.quiesce()
            setup.arm(Fault("none", 0))
            twin.check(setup.engine.store)
            setup.arm(fault)
        assert failed <= fault.struck


@given(twins(), st.sampled_from(CALLS), st.integers(0, 20), st.data(), SEEDS)
def test_engine__raises_if_hardware_fails_permanently(
    twin: Twin, call: str, number: int, data: st.DataObject, seed: int
) -> None:
    """Nothing hangs, and the result of a step that was done is right."""
    with bench(twin, seed) as setup:
        plan = data.draw(plans(setup.workload))
        setup.engine.set_plan(plan, setup.workload)
        setup.arm(Fault(call, number, always=True))
        for _ in range(4):
            try:
                twin.step(setup.engine)
            except OperationFailed:
                twin.check()
                break
            except (EngineError, Broken):
                break
            twin.check()


def test_engine__completes_steps_if_the_device_is_full() -> None:
    """The step is completed, the plan cannot start again, and one that needs less
    memory succeeds."""
    twin = Twin([120], [torch.bfloat16], 30, 1)
    with bench(twin) as setup:
        plan = make(
            setup.workload, ["resident", "streamed", "streamed", "cpu"], kept=(0, 1, 2)
        )
        setup.engine.set_plan(plan, setup.workload)
        twin.step(setup.engine)
        setup.engine.quiesce()
        # The job takes memory that was reserved for the plan: what is left has room for
        # no streamed subgroup.
        smaller = make(setup.workload, ["resident", "cpu", "cpu", "cpu"])
        setup.engine.store._arena.release()
        setup.device.capacity_bytes = device_bytes(smaller, setup.workload)
        with pytest.raises(OperationFailed) as failure:
            twin.step(setup.engine)
        assert isinstance(failure.value.__cause__, DeviceMemoryError)
        twin.check(setup.engine.store)
        with pytest.raises(DeviceMemoryError):
            setup.engine.set_plan(plan, setup.workload)
        twin.check(setup.engine.store)
        setup.engine.set_plan(smaller, setup.workload)
        twin.step(setup.engine)
        setup.engine.quiesce()
        twin.check(setup.engine.store)


@pytest.mark.parametrize("quiesces", [False, True])
def test_engine__early_failure_is_raised_by_step_and_dropped_by_quiesce(
    quiesces: bool,
) -> None:
    """An operation at the start of the iteration fails during the forward."""
    twin = Twin([120], [torch.bfloat16], 30, 1)
    with bench(twin) as setup:
        plan = make(setup.workload, ["parked"] * 4, kept=range(4))
        early_ops = tuple(
            op._replace(start=OTHER) if op.kind == "flush" else op for op in plan.ops
        )
        setup.arm(Fault("d2h", 0, "half"))
        setup.engine.set_plan(replace(plan, ops=early_ops), setup.workload)
        deadline = time.monotonic() + 10
        while not setup.device.fault.struck:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        if quiesces:
            setup.engine.quiesce()
            twin.check(setup.engine.store)
            twin.step(setup.engine)
        else:
            with pytest.raises(OperationFailed):
                twin.step(setup.engine)
        for _ in range(2):
            twin.step(setup.engine)
            setup.engine.quiesce()
            twin.check(setup.engine.store)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("when", WHEN)
def test_engine__failed_update_loses_the_state_and_says_so(
    placement: str, when: str
) -> None:
    """A part of the subgroup is updated by then, and must not be updated again."""
    twin = Twin([10] * 8, [torch.bfloat16] * 8, 40, 3)
    with bench(twin) as setup:
        setup.engine.set_plan(make(setup.workload, [placement] * 2), setup.workload)
        twin.step(setup.engine)
        twin.check()
        setup.arm(
            Fault("kernel" if placement in ("cpu", "cast") else "update", 1, when)
        )
        with pytest.raises(
            EngineError, match=r"subgroup \d failed midway: its state is lost"
        ) as error:
            twin.step(setup.engine)
        assert not isinstance(error.value, OperationFailed)


def test_engine__failed_update_releases_a_returned_gradient() -> None:
    twin = Twin([100], [torch.bfloat16], 50, 0)
    with bench(twin) as setup:
        setup.engine.set_plan(make(setup.workload, ["resident"] * 2), setup.workload)
        setup.arm(Fault("update", 0))
        with pytest.raises(EngineError):
            twin.step(setup.engine)


def test_engine__raises_without_host_memory_to_complete_a_step() -> None:
    twin = Twin([100], [torch.bfloat16], 50, 0)
    with bench(twin) as setup:
        setup.engine.set_plan(make(setup.workload, ["resident"] * 2), setup.workload)
        setup.arm(Fault("h2d", 0))
        setup.device.allocate_host = no_memory  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no memory"):
            twin.step(setup.engine)


def no_memory(
    shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
) -> torch.Tensor:
    raise EngineError("the host has no memory left")
