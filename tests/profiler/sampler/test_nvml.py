"""Values of one card through NVML, and the error that each failure becomes."""

from __future__ import annotations

import pynvml
import pytest

from ebbtide.profiler.sampler.gpu import Gpu, open_gpus
from ebbtide.profiler.sampler.nvml import GpuLost, Nvml, NvmlError, Unsupported
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from tests.profiler.sampler.fake_nvml import GIB, FakeCard, FakeNvml, counting, hopper

RX, TX = pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES


def gpu_of(card: FakeCard, without: tuple[str, ...] = ()) -> Gpu:
    return open_gpus(Nvml(FakeNvml(card, without=without))).gpus[0]


PEAKS = [
    (1, 1, 0.25),
    (2, 16, 8.0),
    (3, 16, 15.75),
    (4, 16, 31.5),
    (4, 8, 15.75),
    (5, 16, 63.0),
    (6, 16, 121.0),
]


def test_link_peak_bytes_per_s__matches_the_specification() -> None:
    for generation, width, gigabytes in PEAKS:
        assert link_peak_bytes_per_s(generation, width) == pytest.approx(
            gigabytes * 1e9, rel=1e-3
        )


def test_link_peak_bytes_per_s__is_none_for_an_unknown_link() -> None:
    for generation, width in [
        (None, 16),
        (5, None),
        (None, None),
        (0, 16),
        (5, 0),
        (99, 16),
    ]:
        assert link_peak_bytes_per_s(generation, width) is None


CLASSES = [
    (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost),
    (pynvml.NVML_ERROR_NOT_SUPPORTED, Unsupported),
    (pynvml.NVML_ERROR_NO_PERMISSION, Unsupported),
    (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, Unsupported),
    (pynvml.NVML_ERROR_TIMEOUT, NvmlError),
    (pynvml.NVML_ERROR_UNKNOWN, NvmlError),
    (12345, NvmlError),
]


def test_nvml_error__has_a_class_for_each_kind_of_failure() -> None:
    for code, kind in CLASSES:
        gpu = gpu_of(FakeCard().fail("nvmlDeviceGetMemoryInfo", code))
        with pytest.raises(NvmlError, match=r"\w+") as caught:
            gpu.read_used_bytes()
        assert type(caught.value) is kind


def test_describe__returns_the_facts_of_a_card() -> None:
    description = gpu_of(
        FakeCard(uuid="GPU-7", name=b"Fake A100", generation=4)
    ).describe()
    assert description["link"].pop("peak_bytes_per_s") == pytest.approx(
        31.5e9, rel=1e-3
    )
    assert description == {
        "index": 0,
        "name": "Fake A100",
        "uuid": "GPU-7",
        "capacity_bytes": 80 * GIB,
        "pci_bus_id": "00000000:1B:00.0",
        "link": {"generation": 4, "width": 16, "max_generation": 4, "max_width": 16},
    }


def test_describe__returns_none_for_what_the_card_does_not_report() -> None:
    description = gpu_of(
        FakeCard().fail("*", pynvml.NVML_ERROR_NOT_SUPPORTED, first=2)
    ).describe()
    link = description.pop("link")
    assert set(link.values()) == {None}
    assert description == dict.fromkeys(
        ("name", "uuid", "capacity_bytes", "pci_bus_id"), None
    ) | {"index": 0}


def test_read_link__returns_none_for_an_unsupported_value() -> None:
    gpu = gpu_of(
        FakeCard().fail(
            "nvmlDeviceGetCurrPcieLinkGeneration", pynvml.NVML_ERROR_NOT_SUPPORTED
        )
    )
    assert (gpu.read_link().generation, gpu.read_link().width) == (None, 16)


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_gpus__leaves_out_a_card_that_cannot_be_opened(code: int) -> None:
    closed = FakeCard().fail("nvmlDeviceGetHandleByIndex", code)
    gpus = open_gpus(Nvml(FakeNvml(closed, FakeCard(uuid="GPU-b")))).gpus
    assert [(gpu.index, gpu.describe()["uuid"]) for gpu in gpus] == [(1, "GPU-b")]


@pytest.mark.parametrize(
    ("value_type", "count"),
    [
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 2**32 - 1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, 2**64 - 1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**64 - 1),
    ],
)
def test_read_pcie_counters__reads_every_integer_type(
    value_type: int, count: int
) -> None:
    assert gpu_of(
        counting(counters=[count, 5], value_type=value_type)
    ).read_pcie_counters() == (count, 5)


def test_read_pcie_counters__rejects_an_unknown_type() -> None:
    with pytest.raises(Unsupported, match="type 0"):
        gpu_of(counting(value_type=pynvml.NVML_VALUE_TYPE_DOUBLE)).read_pcie_counters()


@pytest.mark.parametrize("field", [RX, TX])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, Unsupported),
        (pynvml.NVML_ERROR_NO_PERMISSION, Unsupported),
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLost),
        (pynvml.NVML_ERROR_UNKNOWN, NvmlError),
    ],
)
def test_read_pcie_counters__raises_for_one_failed_field(
    field: int, code: int, kind: type[NvmlError]
) -> None:
    with pytest.raises(NvmlError) as caught:
        gpu_of(counting(returns={field: code})).read_pcie_counters()
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "metric",
    [pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC],
)
def test_read_gpm_rates__raises_for_one_failed_metric(metric: int) -> None:
    gpu = gpu_of(hopper(returns={metric: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    first, second = gpu.take_gpm_sample(), gpu.take_gpm_sample()
    with pytest.raises(Unsupported):
        gpu.read_gpm_rates(first, second)


def test_take_gpm_sample__frees_a_sample_that_fails() -> None:
    library = FakeNvml(hopper().fail("nvmlGpmSampleGet", pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(NvmlError):
        open_gpus(Nvml(library)).gpus[0].take_gpm_sample()
    assert library.samples == {}


def test_supports_gpm__is_false_for_a_pynvml_without_gpm() -> None:
    assert gpu_of(hopper()).supports_gpm() is True
    assert (
        gpu_of(hopper(), without=("nvmlGpmQueryDeviceSupport",)).supports_gpm() is False
    )


def test_read_pcie_counters__raises_for_a_pynvml_without_counters() -> None:
    gpu = gpu_of(counting(), without=("NVML_FI_DEV_PCIE_COUNT_RX_BYTES",))
    with pytest.raises(Unsupported):
        gpu.read_pcie_counters()


def test_close__can_be_called_twice() -> None:
    library = FakeNvml(FakeCard())
    nvml = Nvml(library)
    nvml.close()
    nvml.close()
    assert not library.open
    assert nvml.driver() is None
