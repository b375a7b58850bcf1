"""Link throughput from each source that a card may have, and the choice between
them."""

from __future__ import annotations

import pynvml
import pytest

from ebbtide.profiler.sampler.gpu import Gpu, open_gpus
from ebbtide.profiler.sampler.links import (
    CounterSource,
    GpmSource,
    LinkSample,
    LinkSource,
    best_source,
    counter_increase,
)
from ebbtide.profiler.sampler.nvml import GpuLost, Nvml, NvmlError
from tests.profiler.sampler.fake_nvml import FakeCard, FakeNvml, counting, hopper

MS = 1_000_000
RX, TX = pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES


def gpu_of(card: FakeCard) -> Gpu:
    return open_gpus(Nvml(FakeNvml(card))).gpus[0]


class FakeClock:
    """A clock that is set by hand, in milliseconds."""

    ms = 0

    def __call__(self) -> int:
        return self.ms * MS


def read_at(
    source: LinkSource, clock: FakeClock, *milliseconds: int
) -> list[LinkSample | None]:
    samples = []
    for clock.ms in milliseconds:
        samples.append(source.read())
    return samples


WRAPPED = [
    (5, 5, 0),
    (5, 12, 7),
    (2**32 - 3, 4, 7),
    (2**64 - 3, 4, 7),
    (2**32 - 1, 2**32 + 6, 7),
    (2**33, 2**33 + 7, 7),
]


def test_counter_increase__handles_wrapped_counters() -> None:
    for before, after, increase in WRAPPED:
        assert counter_increase(before, after) == increase


def test_counter_source__gives_nothing_for_two_readings_at_one_time() -> None:
    source = CounterSource(gpu_of(counting()), clock := FakeClock())
    assert read_at(source, clock, 1, 1) == [None, None]


def test_counter_source__loses_no_byte_over_a_passing_error() -> None:
    card = counting(step=(1_000_000, 0)).fail(
        "nvmlDeviceGetFieldValues", pynvml.NVML_ERROR_TIMEOUT, first=2, last=2
    )
    source = CounterSource(gpu_of(card), clock := FakeClock())
    assert read_at(source, clock, 0) == [None]
    with pytest.raises(NvmlError, match="Timeout"):
        read_at(source, clock, 10)
    assert read_at(source, clock, 20) == [LinkSample(20 * MS, 20 * MS, 5e7, 0.0)]


def test_gpm_source__gives_nothing_within_100_ms() -> None:
    library = FakeNvml(hopper(gpm=(100.0, 1.0)))
    source = GpmSource(open_gpus(Nvml(library)).gpus[0], clock := FakeClock())
    assert read_at(source, clock, 0, 1, 60, 130) == [
        None,
        None,
        None,
        LinkSample(130 * MS, 130 * MS, 100 * 2**20, 2**20),
    ]
    assert len(library.samples) == 1


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_gpm_source__recovers_from_a_passing_error(function: str) -> None:
    library = FakeNvml(
        card := hopper().fail(function, pynvml.NVML_ERROR_TIMEOUT, first=2, last=2)
    )
    source = GpmSource(open_gpus(Nvml(library)).gpus[0], clock := FakeClock())
    assert read_at(source, clock, 0) == [None]
    if function == "nvmlGpmMetricsGet":
        assert read_at(source, clock, 200) != [None]
    with pytest.raises(NvmlError, match="Timeout"):
        read_at(source, clock, 400)
    assert card.calls[function] == 2
    assert None not in read_at(source, clock, 600, 800)
    assert len(library.samples) == 1


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetFieldValues", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet"],
)
def test_best_source__raises_for_a_card_lost_while_sources_are_tried(
    function: str,
) -> None:
    card = hopper().fail(function, pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(GpuLost):
        best_source(gpu_of(card))
    assert card.calls["nvmlDeviceGetPcieThroughput"] == 0
