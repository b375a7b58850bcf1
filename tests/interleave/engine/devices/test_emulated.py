"""The emulated device: its capacity, its rates, and the arithmetic of the reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.device import copy_now
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import Hyper
from tests.interleave.engine.states import (
    DTYPES,
    arguments,
    assert_same,
    bits,
    plausible_state,
    updated,
)
from tests.interleave.engine.twins import no_thread_left


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with no_thread_left():
        device = EmulatedDevice()
        yield device
        device.close()


@given(st.integers(0, 2000), st.lists(st.integers(1, 60), max_size=30), st.data())
def test_allocate_state__enforces_the_capacity_to_the_byte(
    capacity: int, sizes: list[int], data: st.DataObject
) -> None:
    device = EmulatedDevice(capacity)
    blocks: list[torch.Tensor] = []
    peak_bytes = 0
    for params in sizes:
        need = 12 * params
        used_bytes = sum(block.nbytes for block in blocks)
        if used_bytes + need > capacity:
            with pytest.raises(
                DeviceMemoryError,
                match=f"{capacity - used_bytes} bytes left, and {need} are needed",
            ):
                device.allocate_state(params)
        else:
            blocks.append(device.allocate_state(params))
        peak_bytes = max(peak_bytes, sum(block.nbytes for block in blocks))
        if blocks and data.draw(st.booleans()):
            device.release(blocks.pop(data.draw(st.integers(0, len(blocks) - 1))))
        assert device.used_bytes == sum(block.nbytes for block in blocks)
        assert device.peak_bytes == peak_bytes
    device.close()


def test_memory__is_nan_before_the_first_write_and_after_release(
    device: EmulatedDevice,
) -> None:
    block = device.allocate_state(5)
    assert block.isnan().all()
    block.fill_(1.0)
    device.release(block)
    assert block.isnan().all()


def test_release__raises_for_memory_that_was_released(device: EmulatedDevice) -> None:
    block, other = device.allocate_state(3), device.allocate_state(3)
    device.release(block)
    with pytest.raises(KeyError):
        device.release(block)
    assert device.used_bytes == other.nbytes


def test_allocate_state__works_with_many_threads(device: EmulatedDevice) -> None:
    device.capacity_bytes = 4 * 12 * 7
    refused: list[int] = []

    def work() -> None:
        for _ in range(300):
            try:
                block = device.allocate_state(7)
            except DeviceMemoryError:
                refused.append(1)
                time.sleep(0)
                continue
            time.sleep(0)
            device.release(block)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.used_bytes == 0
    assert len(refused) < 6 * 300
    assert 0 < device.peak_bytes <= device.capacity_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy__keeps_every_bit(device: EmulatedDevice, dtype: torch.dtype) -> None:
    """Copies of any length, larger than a throttled chunk, and into the middle of a
    tensor."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(3, 700_001, generator=generator).to(dtype)
    target = torch.zeros(3 * 700_001 + 2, dtype=dtype)
    device.copy("h2d", [(source, target[1:-1]), (source[0, :1], target[-1:])])
    device.record("h2d").synchronize()
    assert torch.equal(bits(target[1:-1]), bits(source.reshape(-1)))
    assert target[0] == 0
    assert target[-1] == source[0, 0]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy__takes_at_least_the_time_of_its_rate(direction: str) -> None:
    rates = {f"{direction}_bytes_per_s": 40e6}
    device = EmulatedDevice(**rates)
    source, target = torch.ones(1_000_000), torch.zeros(1_000_000)
    begin = time.perf_counter()
    copy_now(device, direction, [(source, target)])  # type: ignore[arg-type]
    assert time.perf_counter() - begin >= 0.1
    assert torch.equal(source, target)
    device.close()


def test_update__takes_at_least_the_time_of_its_rate_and_gives_the_bits_of_the_reference() -> (
    None
):
    device = EmulatedDevice(gpu_update_params_per_s=1e5)
    state = plausible_state(5000, torch.bfloat16, torch.bfloat16, 0)
    scalars = Hyper().scalars(3, 0.5)
    expected = updated(state, scalars)
    begin = time.perf_counter()
    device.update([TensorUpdate(*arguments(state), scalars)])
    device.record("gpu").synchronize()
    assert time.perf_counter() - begin >= 0.05
    assert_same(state, expected)
    device.close()
