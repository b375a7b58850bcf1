"""The store: it gives the bits of the reference with any plan and any timing, and its
memory is exact to the byte."""

from __future__ import annotations

import gc
import sys
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
from tests.interleave.engine.plans import PLACEMENTS, make, plans, workload_of
from tests.interleave.engine.states import bits
from tests.interleave.engine.twins import (
    Jitter,
    JitteryDevice,
    JitteryKernel,
    Twin,
    hasty_switches,
    no_thread_left,
    one_step,
    place,
    twins,
)

SEEDS = st.integers(0, 2**32)


@dataclass
class Bench:
    """A store that runs plans, with its device and the random delays of its
    hardware."""

    device: JitteryDevice
    kernel: JitteryKernel
    store: Store
    executor: Executor
    jitter: Jitter


@contextmanager
def bench(twin: Twin, seed: int) -> Iterator[Bench]:
    """Yield a bench; at its end all memory and threads are released."""
    jitter = Jitter(seed)
    device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
    store = Store(twin.subgroups, device, kernel)
    twin.begin(store)
    with no_thread_left(), hasty_switches():
        executor = Executor(jitter.around(store.perform), device, store.fits, store.end)
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
def test_engine__random_plans_give_the_bits_of_the_reference(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    """The engine starts the next iteration at the end of a step, and may be stopped in
    between.

    Gradients may be offloaded as soon as they are computed; then all updates wait for
    the step."""
    jitter = Jitter(seed)
    stay = data.draw(st.booleans())
    clipping = not stay or data.draw(st.booleans())
    workload = workload_of(twin.sizes, clipping, stay, width_of(twin))
    with no_thread_left(), hasty_switches():
        device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
        engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
        try:
            twin.begin(engine.store)
            for _ in range(data.draw(st.integers(1, 3))):
                engine.set_plan(data.draw(plans(workload)), workload)
                for _ in range(data.draw(st.integers(1, 3))):
                    offloaded_share = 0.0 if stay else data.draw(st.floats(0, 1))
                    schedule = twin.step(
                        engine, 0.75 if clipping else 1.0, offloaded_share
                    )
                    assert schedule is engine.last_schedule
                    twin.check()
                    if data.draw(st.booleans()):
                        engine.quiesce()
                        twin.check(engine.store)
        finally:
            engine.close()
            device.close()
            kernel.close()
    assert device.used_bytes == 0


@given(twins(), st.data(), SEEDS)
def test_recall_gradients__returns_offloaded_gradients_from_host_and_device(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    """Some copies are done, some are in flight; the next step is complete."""
    jitter = Jitter(seed)
    workload = workload_of(twin.sizes, True, False, width_of(twin))
    device, kernel = JitteryDevice(jitter), JitteryKernel(jitter)
    engine = Engine(Store(twin.subgroups, device, kernel), len(twin.params))
    try:
        twin.begin(engine.store)
        engine.set_plan(data.draw(plans(workload)), workload)
        for _ in range(2):
            update = twin.update()
            gradients = {
                index: gradient
                for index, gradient in enumerate(update.gradients)
                if gradient is not None
            }
            offloaded = (
                data.draw(st.lists(st.sampled_from(sorted(gradients)), unique=True))
                if gradients
                else []
            )
            for index in offloaded:
                engine.offload_gradient(index, gradients[index].clone())
                engine.report_progress(data.draw(st.floats(0, 1)))
            jitter()
            recalled = engine.recall_gradients(twin.params)
            assert recalled.keys() == set(offloaded)
            for index, gradient in recalled.items():
                assert torch.equal(bits(gradient), bits(gradients[index]))
            engine.submit_gradients(gradients)
            engine.step(update.values, update.scalars)
            twin.check()
    finally:
        engine.close()
        device.close()
        kernel.close()


@given(twins(), st.data(), SEEDS)
def test_states__can_be_written_on_host_and_device(
    twin: Twin, data: st.DataObject, seed: int
) -> None:
    workload = workload_of(twin.sizes, True, True, width_of(twin))
    plan = data.draw(plans(workload))
    with bench(twin, seed) as setup:
        place(setup.store, plan, workload)
        for number, size in enumerate(twin.sizes):
            setup.store.states.write(number, torch.full((3, size), float("inf")))
        twin.begin(setup.store)
        twin.check(setup.store)
        setup.store.update = twin.update()
        one_step(setup.executor, plan)
        twin.check(setup.store)


def test_store__ignores_the_default_dtype_and_device_of_torch() -> None:
    """Jobs set a default dtype and a default device."""
    twin = Twin([64, 230], [torch.float32] * 2, 60, 0)
    workload = workload_of(twin.sizes, True, True, 4)
    with bench(twin, 0) as setup:
        plan = make(workload, PLACEMENTS, kept=(2, 4))
        setup.store.update = twin.update()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                place(setup.store, plan, workload)
                one_step(setup.executor, plan)
                states = [
                    setup.store.states.read(number) for number in range(len(twin.sizes))
                ]
        finally:
            torch.set_default_dtype(torch.float32)
        assert {state.dtype for state in states} == {torch.float32}
        twin.check(setup.store)


class PinningDevice(JitteryDevice):
    """An emulated device that records which host memory is pinned."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__(jitter)
        self.pinned: dict[int, bool] = {}

    def allocate_host(
        self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = True
    ) -> torch.Tensor:
        block = super().allocate_host(shape, dtype, pinned)
        self.pinned[block.data_ptr()] = pinned
        return block


@given(st.data())
def test_apply_placement__pins_buffers_as_in_the_plan(data: st.DataObject) -> None:
    twin = Twin([60], [torch.bfloat16], 20, 0)
    workload = workload_of(twin.sizes, True, True)
    device = PinningDevice(Jitter(0, 0.0))
    kernel = JitteryKernel(Jitter(0, 0.0))
    store = Store(twin.subgroups, device, kernel)
    twin.begin(store)
    copied: dict[tuple[str, int], bool] = {}
    for plan in data.draw(st.lists(plans(workload), min_size=1, max_size=3)):
        place(store, plan, workload)
        store.update = twin.update()
        for op in plan.ops:
            store.perform(op)
        blocks = {
            "gradient down": store._buffers.gradients,
            "upload": store._buffers.params,
        }
        copied = {
            (op.kind, op.subgroup): device.pinned[
                blocks[op.kind][op.subgroup].data_ptr()
            ]
            for op in plan.ops
            if op.kind in blocks
        }
        assert copied == {
            (op.kind, op.subgroup): not op.pageable
            for op in plan.ops
            if op.kind in blocks
        }
    device.close()
    kernel.close()


def in_use(engine: Engine, twin: Twin) -> tuple[int, int, int, int]:
    """Return the number of blocks of Python's memory, number of tensors, bytes on the
    device, bytes on the host."""
    engine.quiesce()
    for param in twin.reference.params:
        param.grad = None
    gc.collect()
    tensors = sum(type(instance) is torch.Tensor for instance in gc.get_objects())
    return (
        sys.getallocatedblocks(),
        tensors,
        engine.device.used_bytes,
        engine.store.host_bytes,
    )


def test_apply_placement__keeps_the_state_if_the_device_is_too_small() -> None:
    """The placement fails midway; afterwards another plan can use the state."""
    twin = Twin([100], [torch.bfloat16], 25, 0)
    workload = workload_of(twin.sizes, True, True)
    with bench(twin, 0) as setup:
        setup.device.capacity_bytes = 12 * 60
        for _ in range(2):
            with pytest.raises(DeviceMemoryError):
                place(setup.store, make(workload, ["resident"] * 4), workload)
            twin.check(setup.store)
        plan = make(workload, ["cpu"] * 4)
        place(setup.store, plan, workload)
        assert setup.device.used_bytes == 0
        setup.store.update = twin.update()
        one_step(setup.executor, plan)
        twin.check(setup.store)
