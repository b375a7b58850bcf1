"""Readings of utilization, power, clocks and temperature, and their failures."""

from __future__ import annotations

import pynvml
import pytest

from ebbtide.profiler.sampler.gpu import GpuStateReader, open_gpus
from ebbtide.profiler.sampler.nvml import Nvml
from tests.profiler.sampler.fake_nvml import FakeCard, FakeNvml

# Each function of NVML, and the quantities that only it gives.
FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": {"utilization", "memory_utilization"},
    "nvmlDeviceGetClockInfo": {"sm_clock", "memory_clock"},
    "nvmlDeviceGetTemperature": {"temperature"},
}
POWER = ("instant power", "nvmlDeviceGetPowerUsage")
REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)
ALL = {
    "utilization": 97,
    "memory_utilization": 41,
    "power": 402_500,
    "sm_clock": 1980,
    "memory_clock": 2619,
    "temperature": 61,
    "throttle_reasons": 4,
}


def reader_of(card: FakeCard, without: tuple[str, ...] = ()) -> GpuStateReader:
    return GpuStateReader(open_gpus(Nvml(FakeNvml(card, without=without))).gpus[0])


def test_read__keeps_a_true_zero() -> None:
    values = reader_of(FakeCard(utilization=(0, 0), reasons=0)).read()
    assert (
        values["utilization"],
        values["memory_utilization"],
        values["throttle_reasons"],
    ) == (0, 0, 0)


def test_read__takes_the_older_name_of_the_reasons() -> None:
    reader = reader_of(FakeCard(reasons=0x20), without=REASONS[:1])
    assert reader.read()["throttle_reasons"] == 0x20
    assert reader.refusals() is None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_read__leaves_out_what_the_card_refuses_and_does_not_ask_again(
    function: str, code: int
) -> None:
    reader = reader_of(card := FakeCard().fail(function, code))
    rest = {
        quantity: value
        for quantity, value in ALL.items()
        if quantity not in FUNCTIONS[function]
    }
    assert [reader.read() for _ in range(3)] == [rest] * 3
    assert card.calls[function] == (2 if function == "nvmlDeviceGetClockInfo" else 1)
    refused = ", ".join(
        quantity.replace("_", " ")
        for quantity in ALL
        if quantity in FUNCTIONS[function]
    )
    assert reader.refusals() == f"{refused} ({pynvml.NVMLError(code)})"


@pytest.mark.parametrize(
    ("quantity", "functions"), [("power", POWER), ("throttle_reasons", REASONS)]
)
def test_read__leaves_out_what_both_functions_refuse(
    quantity: str, functions: tuple[str, str]
) -> None:
    card = FakeCard()
    for function in functions:
        card.fail(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    reader = reader_of(card)
    assert [set(ALL) - set(reader.read()) for _ in range(2)] == [{quantity}] * 2
    assert [card.calls[function] for function in functions] == [1, 1]
    assert set(reader.refused) == {quantity}


def test_read__leaves_out_a_quantity_that_this_pynvml_does_not_have() -> None:
    reader = reader_of(FakeCard(), without=("nvmlDeviceGetTemperature",))
    assert "temperature" not in reader.read()
    assert "nvmlDeviceGetTemperature" in (reader.refusals() or "")


def test_read__leaves_a_gap_for_a_passing_error() -> None:
    card = FakeCard().fail(
        "nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_TIMEOUT, first=2, last=10
    )
    reader = reader_of(card)
    recorded = [reader.read().get("utilization") for _ in range(12)]
    assert recorded == [97, *[None] * 9, 97, 97]
    assert reader.refusals() is None


def test_read__gives_up_after_ten_errors_in_a_row() -> None:
    reader = reader_of(
        card := FakeCard().fail("nvmlDeviceGetTemperature", pynvml.NVML_ERROR_UNKNOWN)
    )
    for _ in range(12):
        assert set(ALL) - set(reader.read()) == {"temperature"}
    assert card.calls["nvmlDeviceGetTemperature"] == 10
    assert reader.refusals() == "temperature (Unknown Error)"
