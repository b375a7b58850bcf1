"""The store: the reference's bits by any plan and under any timing, and memory that is counted to the byte."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.runtime.engine import Engine
from ebbtide.interleave.engine.runtime.executor import Executor
from ebbtide.interleave.engine.runtime.store import Store
from tests.interleave.engine.plans import HOMES, device_bytes, make, plans, workload_of
from tests.interleave.engine.states import bits
from tests.interleave.engine.twins import (
    Jitter,
    JitteryDevice,
    JitteryKernel,
    Twin,
    hasty_switches,
    no_thread_left,
    one_step,
    schedule_of,
    twins,
)

SEEDS = st.integers(0, 2**32)


@dataclass
class Bench:
    """A store that plans run on, with its device and the pauses of its hardware."""

    device: JitteryDevice
    kernel: JitteryKernel
    store: Store
    executor: Executor
    jitter: Jitter


@contextmanager
def bench(twin: Twin, seed: int) -> Iterator[Bench]:
    """All that it takes is given back at the end."""
    jitter = Jitter(seed)
    device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
    store = Store(twin.subgroups, device, kernel)
    twin.begin(store)
    with no_thread_left(), hasty_switches():
        executor = Executor(jitter.around(store.perform))
        try:
            yield Bench(device, kernel, store, executor, jitter)
        finally:
            executor.close()
            store.release()
            device.close()
            kernel.close()
    assert device.used_bytes == store.host_bytes == 0


def width_of(twin: Twin) -> int:
    return max(subgroup.dtype.itemsize for subgroup in twin.subgroups)


@given(twins(), st.data(), SEEDS)
def test_random_plans_give_the_references_bits(twin: Twin, data: st.DataObject, seed: int) -> None:
    """Steps by one plan after another, updates from the backward on where the plan has them there."""
    clipping = data.draw(st.booleans())
    workload = workload_of(twin.sizes, clipping, data.draw(st.booleans()), width_of(twin))
    with bench(twin, seed) as at:
        for _ in range(data.draw(st.integers(1, 3))):
            plan = data.draw(plans(workload))
            at.device.capacity_bytes = None
            at.store.settle(plan)
            if data.draw(st.booleans()):
                at.device.capacity_bytes = device_bytes(plan, workload)
            for _ in range(data.draw(st.integers(1, 3))):
                at.store.inputs = twin.inputs(0.75 if clipping else 1.0, streams=not workload.gradients_stay)
                at.device.peak_bytes = at.device.used_bytes
                run = one_step(at.executor, plan, at.jitter)
                assert at.device.peak_bytes <= schedule_of(run, workload).peak_device_bytes
                twin.check()
            twin.check(at.store)


@given(twins(), st.data(), SEEDS)
def test_the_engine_gives_the_references_bits(twin: Twin, data: st.DataObject, seed: int) -> None:
    """As the optimizer runs plans: what the next iteration begins with begins while nobody looks, and everything may
    have to rest in between. Gradients may leave as they are made; then all updates wait for the step."""
    jitter = Jitter(seed)
    stay = data.draw(st.booleans())
    clipping = not stay or data.draw(st.booleans())
    workload = workload_of(twin.sizes, clipping, stay, width_of(twin))
    with no_thread_left(), hasty_switches():
        device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
        engine = Engine(twin.subgroups, len(twin.params), device, kernel)
        try:
            twin.begin(engine.store)
            for _ in range(data.draw(st.integers(1, 3))):
                engine.follow(data.draw(plans(workload)), workload)
                for _ in range(data.draw(st.integers(1, 3))):
                    taken = 0.0 if stay else data.draw(st.floats(0, 1))
                    schedule = twin.step(engine, 0.75 if clipping else 1.0, taken)
                    assert schedule is engine.last
                    twin.check()
                    if data.draw(st.booleans()):
                        engine.rest()
                        twin.check(engine.store)
        finally:
            engine.close()
            device.close()
            kernel.close()
    assert device.used_bytes == 0


@given(twins(), st.data(), SEEDS)
def test_gradients_that_were_taken_come_back_from_wherever_they_are(twin: Twin, data: st.DataObject, seed: int) -> None:
    """Some have left the device, some are on their way; the step that follows is whole."""
    jitter = Jitter(seed)
    workload = workload_of(twin.sizes, True, False, width_of(twin))
    device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
    engine = Engine(twin.subgroups, len(twin.params), device, kernel)
    try:
        twin.begin(engine.store)
        engine.follow(data.draw(plans(workload)), workload)
        for _ in range(2):
            inputs = twin.inputs()
            gradients = {index: gradient for index, gradient in enumerate(inputs.gradients) if gradient is not None}
            taken = data.draw(st.lists(st.sampled_from(sorted(gradients)), unique=True)) if gradients else []
            for index in taken:
                engine.take(index, gradients[index].clone())
                engine.reach(data.draw(st.floats(0, 1)))
            jitter()
            found = engine.give_back(twin.params)
            assert found.keys() == set(taken)
            for index, gradient in found.items():
                assert torch.equal(bits(gradient), bits(gradients[index]))
            engine.give(gradients)
            engine.step(inputs.values, inputs.scalars)
            twin.check()
    finally:
        engine.close()
        device.close()
        kernel.close()


@given(twins(mixed=False), st.data(), SEEDS)
def test_host_memory_is_what_the_schedule_says(twin: Twin, data: st.DataObject, seed: int) -> None:
    """Under one plan after another, before and after a step."""
    workload = workload_of(twin.sizes, True, True, width_of(twin))
    with bench(twin, seed) as at:
        for plan in (data.draw(plans(workload)), data.draw(plans(workload))):
            at.store.settle(plan)
            before = at.store.host_bytes
            at.store.inputs = twin.inputs()
            run = one_step(at.executor, plan)
            assert before == at.store.host_bytes == schedule_of(run, workload).host_bytes()


@given(twins(), st.data(), SEEDS)
def test_state_can_be_set_wherever_it_is(twin: Twin, data: st.DataObject, seed: int) -> None:
    workload = workload_of(twin.sizes, True, True, width_of(twin))
    plan = data.draw(plans(workload))
    with bench(twin, seed) as at:
        at.store.settle(plan)
        for number, size in enumerate(twin.sizes):
            at.store.write(number, torch.full((3, size), float("inf")))
        twin.begin(at.store)
        twin.check(at.store)
        at.store.inputs = twin.inputs()
        one_step(at.executor, plan)
        twin.check(at.store)


def test_what_torch_makes_by_default_does_not_matter() -> None:
    """Jobs set a precision and a device for whatever says none."""
    twin = Twin([64, 230], [torch.float32] * 2, 60, 0)
    workload = workload_of(twin.sizes, True, True, 4)
    with bench(twin, 0) as at:
        plan = make(workload, HOMES, kept=(2, 4))
        at.store.inputs = twin.inputs()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                at.store.settle(plan)
                one_step(at.executor, plan)
                found = [at.store.read(number) for number in range(len(twin.sizes))]
        finally:
            torch.set_default_dtype(torch.float32)
        assert {state.dtype for state in found} == {torch.float32}
        twin.check(at.store)


class PinningDevice(JitteryDevice):
    """Knows which of the host's memory is pinned."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__(jitter)
        self.pinned: dict[int, bool] = {}

    def host(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        block = super().host(shape, dtype, pinned)
        self.pinned[block.data_ptr()] = pinned
        return block


@given(st.data())
def test_buffers_are_pinned_where_the_plan_has_them_so(data: st.DataObject) -> None:
    twin = Twin([60], [torch.bfloat16], 20, 0)
    workload = workload_of(twin.sizes, True, True)
    device = PinningDevice(Jitter(0, 0.0))
    kernel = JitteryKernel(Jitter(0, 0.0))
    store = Store(twin.subgroups, device, kernel)
    twin.begin(store)
    copied: dict[tuple[str, int], bool] = {}
    for plan in data.draw(st.lists(plans(workload), min_size=1, max_size=3)):
        store.settle(plan)
        store.inputs = twin.inputs()
        for op in plan.ops:
            store.perform(op)
        blocks = {"gradient down": store._down, "upload": store._out}
        copied = {
            (op.kind, op.subgroup): device.pinned[blocks[op.kind][op.subgroup].data_ptr()]
            for op in plan.ops
            if op.kind in blocks
        }
        assert copied == {(op.kind, op.subgroup): not op.pageable for op in plan.ops if op.kind in blocks}
    device.close()
    kernel.close()


@pytest.mark.slow
def test_a_thousand_steps_take_no_more_memory_than_ten() -> None:
    twin = Twin([64, 230], [torch.bfloat16] * 2, 60, 0)
    workload = workload_of(twin.sizes, True, True)
    device, kernel = JitteryDevice(Jitter(0, 0.0)), JitteryKernel(Jitter(0, 0.0))
    engine = Engine(twin.subgroups, len(twin.params), device, kernel)
    twin.begin(engine.store)
    engine.follow(make(workload, HOMES, kept=(2, 4)), workload)
    tracemalloc.start()
    try:
        for step in range(1000):
            twin.step(engine)
            if step == 10:
                early = in_use(engine, twin)
        late = in_use(engine, twin)
    finally:
        tracemalloc.stop()
        engine.close()
        device.close()
        kernel.close()
    twin.check()
    assert late[0] - early[0] < 30_000
    assert late[1:] == early[1:]


def in_use(engine: Engine, twin: Twin) -> tuple[int, int, int, int]:
    """Bytes of Python's own; tensors; bytes on the device and the host."""
    engine.rest()
    for param in twin.reference.params:
        param.grad = None
    gc.collect()
    tensors = sum(type(found) is torch.Tensor for found in gc.get_objects())
    return tracemalloc.get_traced_memory()[0], tensors, engine.device.used_bytes, engine.store.host_bytes


def test_a_device_that_is_too_small_changes_nothing() -> None:
    """Settling breaks off in the middle; afterwards another plan can have the state."""
    twin = Twin([100], [torch.bfloat16], 25, 0)
    workload = workload_of(twin.sizes, True, True)
    with bench(twin, 0) as at:
        at.device.capacity_bytes = 12 * 60
        for _ in range(2):
            with pytest.raises(DeviceMemoryError):
                at.store.settle(make(workload, ["resident"] * 4))
            twin.check(at.store)
        plan = make(workload, ["cpu"] * 4)
        at.store.settle(plan)
        assert at.device.used_bytes == 0
        at.store.inputs = twin.inputs()
        one_step(at.executor, plan)
        twin.check(at.store)
