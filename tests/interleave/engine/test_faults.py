"""Whatever fails while a plan runs: the step is done all the same, to the reference's bits, or it is said clearly that
it could not be; and nothing hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.device import Direction
from ebbtide.interleave.engine.errors import DeviceMemoryError, EngineError
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import Scalars
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Executor, Stopped
from ebbtide.interleave.engine.runtime.store import Store
from ebbtide.interleave.model.plan import OTHER, Op, Plan
from ebbtide.interleave.model.workload import Workload
from tests.interleave.engine.jobs import ReferenceAdamW, closing
from tests.interleave.engine.plans import HOMES, device_bytes, make, plans, workload_of
from tests.interleave.engine.states import bits
from tests.interleave.engine.twins import Jitter, JitteryDevice, Twin, hasty_switches, no_thread_left, one_step, twins

SEEDS = st.integers(0, 2**32)
# What can fail: an update on either side, a copy, room for state or a gradient on the device, memory on the host.
UPDATES = ("kernel", "update")
CALLS = (*UPDATES, "h2d", "d2h", "state", "host")
WHEN = ("before", "half", "after")


@dataclass
class Fault:
    """One call of a kind fails: `number` more of them go well before it. always: so does every later one."""

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
    """What is worked on before it breaks."""
    length = {"before": 0, "half": len(tensors[0].reshape(-1)) // 2, "after": len(tensors[0].reshape(-1))}[when]
    return [tensor.reshape(-1)[:length] for tensor in tensors]


class FaultyKernel(CpuKernel):
    def __init__(self) -> None:
        super().__init__(1)
        self.fault = Fault("none", 0)

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor | None,
        scalars: Scalars,
    ) -> None:
        if self.fault.strikes("kernel"):
            begun = part((grad, master, exp_avg, exp_avg_sq), self.fault.when)
            super().update(begun[0], begun[1], begun[2], begun[3], None, scalars)
            raise Broken
        super().update(grad, master, exp_avg, exp_avg_sq, out, scalars)


class FaultyDevice(JitteryDevice):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(jitter)
        self.fault = Fault("none", 0)

    def copy(self, direction: Direction, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.fault.strikes(direction):
            for source, target in pairs:
                begun = part((source, target), self.fault.when)
                super().copy(direction, [(begun[0], begun[1])])
            raise Broken
        super().copy(direction, pairs)

    def update(
        self,
        grad: torch.Tensor,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        out: torch.Tensor,
        scalars: Scalars,
    ) -> None:
        if self.fault.strikes("update"):
            super().update(*part((grad, master, exp_avg, exp_avg_sq, out), self.fault.when), scalars)
            raise Broken
        super().update(grad, master, exp_avg, exp_avg_sq, out, scalars)

    def state(self, params: int, rows: int = 3) -> torch.Tensor:
        if self.fault.strikes("state"):
            raise DeviceMemoryError("no room")
        return super().state(params, rows)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        if self.fault.strikes("host"):
            raise EngineError("the host has no memory left")
        return super().host(shape, dtype, pinned)


@dataclass
class Bench:
    engine: Engine
    device: FaultyDevice
    kernel: FaultyKernel
    workload: Workload

    def arm(self, fault: Fault) -> None:
        self.device.fault = self.kernel.fault = fault


@contextlib.contextmanager
def bench(twin: Twin, seed: int = 0, clipping: bool = True, stay: bool = True) -> Iterator[Bench]:
    """An engine with the twin's state. Whatever happens on it, closing ends all threads and gives all memory back."""
    jitter = Jitter(seed, 2e-4)
    width = max(subgroup.dtype.itemsize for subgroup in twin.subgroups)
    with no_thread_left(), hasty_switches():
        device, kernel = FaultyDevice(jitter), FaultyKernel()
        engine = Engine(twin.subgroups, len(twin.params), device, kernel)
        try:
            twin.begin(engine.store)
            yield Bench(engine, device, kernel, workload_of(twin.sizes, clipping, stay, width))
        finally:
            engine.close()
            device.close()
            kernel.close()
    assert device.used_bytes == engine.store.host_bytes == 0


def completes(twin: Twin, plan: Plan, stay: bool, seed: int) -> None:
    """Each operation in turn raises before it has done anything."""
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
        executor = Executor(perform)
        try:
            for op in plan.ops:
                broken[:] = [op]
                store.settle(plan)
                store.inputs = twin.inputs(streams=not stay)
                with pytest.raises(Stopped) as stopped:
                    one_step(executor, plan, jitter)
                store.complete(plan, stopped.value.run.done)
                assert device.used_bytes == 0
                twin.check(store)
            broken.clear()
            store.settle(plan)
            store.inputs = twin.inputs()
            one_step(executor, plan, jitter)
            twin.check(store)
        finally:
            executor.close()
            store.release()
            device.close()
            kernel.close()


@given(twins(), st.booleans(), st.booleans(), st.data(), SEEDS)
def test_a_step_is_completed_whichever_operation_fails(
    twin: Twin, clipping: bool, stay: bool, data: st.DataObject, seed: int
) -> None:
    completes(twin, data.draw(plans(workload_of(twin.sizes, clipping, stay))), stay, seed)


def failure_of(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


@given(twins(), st.data(), SEEDS)
def test_any_call_of_the_hardware_may_fail(twin: Twin, data: st.DataObject, seed: int) -> None:
    """A call of the hardware fails, before, in the middle of or after its work, at any time."""
    fault = Fault(data.draw(st.sampled_from(CALLS)), data.draw(st.integers(0, 30)), data.draw(st.sampled_from(WHEN)))
    stay = data.draw(st.booleans())
    clipping = not stay or data.draw(st.booleans())
    with bench(twin, seed, clipping, stay) as at:
        at.arm(fault)
        failed = 0
        for _ in range(3):
            plan = data.draw(plans(at.workload))
            try:
                at.engine.follow(plan, at.workload)
            except (Broken, EngineError):
                assert fault.struck
                failed += 1
                at.engine.follow(plan, at.workload)
            for _ in range(2):
                failure = failure_of(lambda: twin.step(at.engine, taken=0.0 if stay else 0.7))
                if isinstance(failure, EngineError) and not isinstance(failure, Stopped):
                    assert fault.call in UPDATES
                    assert "broke off" in str(failure)
                    return
                if failure is not None:
                    assert fault.struck
                    assert fault.call not in UPDATES
                    assert isinstance(failure.__cause__, Broken | DeviceMemoryError)
                    failed += 1
                twin.check()
            at.engine.rest()
            at.arm(Fault("none", 0))
            twin.check(at.engine.store)
            at.arm(fault)
        assert failed <= fault.struck


@given(twins(), st.sampled_from(CALLS), st.integers(0, 20), st.data(), SEEDS)
def test_hardware_that_fails_for_good_is_told_at_once(
    twin: Twin, call: str, number: int, data: st.DataObject, seed: int
) -> None:
    """Nothing hangs, and what comes out of a step that could be done is right."""
    with bench(twin, seed) as at:
        plan = data.draw(plans(at.workload))
        at.engine.follow(plan, at.workload)
        at.arm(Fault(call, number, always=True))
        for _ in range(4):
            try:
                twin.step(at.engine)
            except Stopped:
                twin.check()
                break
            except (EngineError, Broken):
                break
            twin.check()


def test_a_device_without_room_for_what_is_fetched() -> None:
    """Every step fails and is done all the same; a plan that takes less goes well."""
    twin = Twin([120], [torch.bfloat16], 30, 1)
    with bench(twin) as at:
        plan = make(at.workload, ["resident", "streamed", "streamed", "cpu"], kept=(0, 1, 2))
        at.engine.follow(plan, at.workload)
        twin.step(at.engine)
        at.engine.rest()
        at.device.capacity_bytes = device_bytes(plan, at.workload) - 1
        for _ in range(3):
            with pytest.raises(Stopped) as stopped:
                twin.step(at.engine)
            assert isinstance(stopped.value.__cause__, DeviceMemoryError)
            twin.check(at.engine.store)
        at.engine.follow(make(at.workload, ["resident", "cpu", "cpu", "cpu"]), at.workload)
        twin.step(at.engine)
        at.engine.rest()
        twin.check(at.engine.store)


@pytest.mark.parametrize("rests", [False, True])
def test_a_failure_before_the_step_is_told_by_it_and_dropped_by_rest(rests: bool) -> None:
    """What begins with the iteration fails while the job is in its forward."""
    twin = Twin([120], [torch.bfloat16], 30, 1)
    with bench(twin) as at:
        plan = make(at.workload, ["parked"] * 4, kept=range(4))
        at_once = tuple(op._replace(point=OTHER) if op.kind == "flush" else op for op in plan.ops)
        at.arm(Fault("d2h", 0, "half"))
        at.engine.follow(replace(plan, ops=at_once), at.workload)
        deadline = time.monotonic() + 10
        while not at.device.fault.struck:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        if rests:
            at.engine.rest()
            twin.check(at.engine.store)
            twin.step(at.engine)
        else:
            with pytest.raises(Stopped):
                twin.step(at.engine)
        for _ in range(2):
            twin.step(at.engine)
            at.engine.rest()
            twin.check(at.engine.store)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("when", WHEN)
def test_an_update_that_breaks_off_loses_the_state_and_says_so(home: str, when: str) -> None:
    """A part of the subgroup has been updated then, and must not be once more."""
    twin = Twin([10] * 8, [torch.bfloat16] * 8, 40, 3)
    with bench(twin) as at:
        at.engine.follow(make(at.workload, [home] * 2), at.workload)
        twin.step(at.engine)
        twin.check()
        at.arm(Fault("kernel" if home in ("cpu", "cast") else "update", 1, when))
        with pytest.raises(EngineError, match=r"subgroup \d broke off: its state is lost") as told:
            twin.step(at.engine)
        assert not isinstance(told.value, Stopped)


def test_a_failed_update_of_a_gradient_that_came_back_up_leaks_nothing() -> None:
    twin = Twin([100], [torch.bfloat16], 50, 0)
    with bench(twin) as at:
        at.engine.follow(make(at.workload, ["resident"] * 2), at.workload)
        at.arm(Fault("update", 0))
        with pytest.raises(EngineError):
            twin.step(at.engine)


def test_no_host_memory_to_complete_a_step() -> None:
    twin = Twin([100], [torch.bfloat16], 50, 0)
    with bench(twin) as at:
        at.engine.follow(make(at.workload, ["resident"] * 2), at.workload)
        at.arm(Fault("h2d", 0))
        at.device.host = no_memory  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no memory"):
            twin.step(at.engine)


def no_memory(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
    raise EngineError("the host has no memory left")


def gradients(params: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["zero-offload", "interleaved:2", "gpu-only"])
def test_a_gradient_that_is_none_changes_nothing(policy: str, poison: float) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (50, 200)]
    reference = ReferenceAdamW([param.detach().clone() for param in params])
    with closing(InterleavedAdamW(params, policy=policy, subgroup_params=60, threads=1)) as optimizer:
        for step in range(6):
            gradients(list(params), step)
            gradients(reference.params, step)
            if step in (0, 3):
                assert params[1].grad is not None
                params[1].grad[199] = poison
                with pytest.raises(EngineError, match="not a number"):
                    optimizer.step()
            else:
                optimizer.step()
                reference.step()
            for param, expected in zip(params, reference.params, strict=True):
                assert torch.equal(bits(param.detach()), bits(expected))


@given(
    st.sampled_from(["zero-offload", "pipelined", "twin-flow:0.5", "interleaved:2", "gpu-only"]),
    st.sampled_from(CALLS),
    st.integers(0, 60),
    st.sampled_from(WHEN),
    SEEDS,
)
def test_the_optimizer_goes_on_after_a_failure(policy: str, call: str, number: int, when: str, seed: int) -> None:
    """With the right number of steps and under a plan of its own; or it is closed, and says that."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (50, 200)]
    reference = ReferenceAdamW([param.detach().clone() for param in params])
    device = FaultyDevice(Jitter(seed, 1e-4))
    with no_thread_left(), contextlib.closing(device):
        optimizer = InterleavedAdamW(params, policy=policy, subgroup_params=60, threads=1, device=device)
        with closing(optimizer):
            fault = device.fault = Fault(call, number, when)
            for step in range(6):
                gradients(list(params), step)
                gradients(reference.params, step)
                try:
                    optimizer.step()
                except EngineError as error:
                    assert fault.struck
                    if "lost" in str(error):
                        assert call in UPDATES
                        with pytest.raises(EngineError, match="closed"):
                            optimizer.step()
                        return
                reference.step()
                for param, expected in zip(params, reference.params, strict=True):
                    assert torch.equal(bits(param.detach()), bits(expected))
