"""The emulated device: memory that ends where it says, links as slow as told, and the reference's arithmetic."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.errors import DeviceMemoryError
from ebbtide.interleave.engine.numerics.reference import Hyper
from tests.interleave.engine.states import DTYPES, assert_same, bits, plausible_state, updated
from tests.interleave.engine.twins import no_thread_left


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with no_thread_left():
        device = EmulatedDevice()
        yield device
        device.close()


@given(st.integers(0, 2000), st.lists(st.integers(1, 60), max_size=30), st.data())
def test_capacity_is_kept_to_the_byte(capacity: int, wanted: list[int], data: st.DataObject) -> None:
    device = EmulatedDevice(capacity)
    there: list[torch.Tensor] = []
    most = 0
    for params in wanted:
        need = 12 * params
        held = sum(block.nbytes for block in there)
        if held + need > capacity:
            with pytest.raises(DeviceMemoryError, match=f"{capacity - held} bytes left, and {need} are needed"):
                device.state(params)
        else:
            there.append(device.state(params))
        most = max(most, sum(block.nbytes for block in there))
        if there and data.draw(st.booleans()):
            device.release(there.pop(data.draw(st.integers(0, len(there) - 1))))
        assert device.used_bytes == sum(block.nbytes for block in there)
        assert device.peak_bytes == most
    device.close()


def test_what_is_not_written_yet_or_not_held_any_more_is_no_number(device: EmulatedDevice) -> None:
    block = device.state(5)
    assert block.isnan().all()
    block.fill_(1.0)
    device.release(block)
    assert block.isnan().all()


def test_what_is_given_back_twice_is_told(device: EmulatedDevice) -> None:
    block, other = device.state(3), device.state(3)
    device.release(block)
    with pytest.raises(KeyError):
        device.release(block)
    assert device.used_bytes == other.nbytes


def test_room_is_taken_and_given_back_by_many_threads(device: EmulatedDevice) -> None:
    device.capacity_bytes = 4 * 12 * 7
    refused: list[int] = []

    def work() -> None:
        for _ in range(300):
            try:
                block = device.state(7)
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
def test_copies_carry_every_bit(device: EmulatedDevice, dtype: torch.dtype) -> None:
    """Pieces of any length, larger than what the link is throttled by, and into the middle of a tensor."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(3, 700_001, generator=generator).to(dtype)
    target = torch.zeros(3 * 700_001 + 2, dtype=dtype)
    device.copy("h2d", [(source, target[1:-1]), (source[0, :1], target[-1:])])
    assert torch.equal(bits(target[1:-1]), bits(source.reshape(-1)))
    assert target[0] == 0
    assert target[-1] == source[0, 0]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_takes_no_less_than_its_rate_allows(direction: str) -> None:
    rates = {f"{direction}_bytes_per_s": 40e6}
    device = EmulatedDevice(**rates)
    source, target = torch.ones(1_000_000), torch.zeros(1_000_000)
    begin = time.perf_counter()
    device.copy(direction, [(source, target)])  # type: ignore[arg-type]
    assert time.perf_counter() - begin >= 0.1
    assert torch.equal(source, target)
    device.close()


def test_an_update_takes_no_less_than_its_rate_allows_and_is_the_references() -> None:
    device = EmulatedDevice(gpu_update_params_per_s=1e5)
    state = plausible_state(5000, torch.bfloat16, torch.bfloat16, 0)
    scalars = Hyper().scalars(3, 0.5)
    expected = updated(state, scalars)
    begin = time.perf_counter()
    device.update(*state, scalars)
    assert time.perf_counter() - begin >= 0.05
    assert_same(state, expected)
    device.close()
