"""Readings of the sampler through the real pynvml, at times that the test sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbtide.profiler.sampler.gpu import GpuStateReader, open_gpus
from ebbtide.profiler.sampler.links import (
    CounterSource,
    LinkSample,
    LinkSource,
    best_source,
)
from ebbtide.profiler.sampler.nvml import GpuLost, Nvml
from tests.nvml_mock.build import LoadedMock
from tests.nvml_mock.cards import (
    A100,
    FORBIDDEN,
    GB200,
    GH200,
    GPM_ONLY,
    H100,
    H200,
    MIG,
    RTX_4090,
    SECOND_NS,
    VGPU,
    WRAPPING,
    MockCard,
)
from tests.nvml_mock.conftest import OpenMock

MS = 1_000_000
# Late enough for 64-bit counters beyond 2**32.
START_NS = 5000 * SECOND_NS


def read_at(
    source: LinkSource, mock: LoadedMock, times_ns: list[int]
) -> list[LinkSample | None]:
    samples = []
    for t_ns in times_ns:
        mock.set_time_ns(t_ns)
        samples.append(source.read())
    return samples


def assert_exact(
    card: MockCard, samples: list[LinkSample | None], count: int, rel: float = 1e-6
) -> None:
    """Check that the samples have the bytes that the card moved in their windows."""
    present = [sample for sample in samples if sample is not None]
    assert len(present) == count
    for sample in present:
        start_ns, seconds = sample.t_ns - sample.window_ns, sample.window_ns / 1e9
        h2d, d2h = (
            card.bytes_between(name, start_ns, sample.t_ns) / seconds
            for name in ("h2d", "d2h")
        )
        assert (sample.h2d_bytes_per_s, sample.d2h_bytes_per_s) == (
            pytest.approx(h2d, rel=rel, abs=1e3),
            pytest.approx(d2h, rel=rel, abs=1e3),
        )


def test_counter_source__gives_nothing_for_a_window_in_which_pcie_6_may_wrap_a_counter(
    open_mock: OpenMock,
) -> None:
    card = replace(WRAPPING, generation=6, max_generation=6, h2d=120_000_000_000)
    (gpu,), mock = open_mock(card)
    source = CounterSource(gpu, clock=lambda: mock.t_ns)
    samples = read_at(source, mock, [START_NS + ms * MS for ms in (0, 30, 70, 100)])
    assert samples[2] is None
    assert_exact(card, samples, count=2)


@pytest.mark.parametrize(
    ("card", "old_driver", "name"),
    [
        (H100, False, "nvml-counters"),
        (H200, False, "gpm"),
        (A100, False, "nvml-throughput"),
        (RTX_4090, False, "nvml-counters"),
        (replace(H100, c2c_links=10, c2c_status=0), False, "nvml-counters"),
        (replace(H100, mig_mode=0), False, "nvml-counters"),
        (H200, True, "nvml-throughput"),
        (VGPU, False, None),
        (FORBIDDEN, False, None),
        (GB200, False, None),
        (GH200, False, None),
        (GPM_ONLY, False, "gpm"),
        (GPM_ONLY, True, None),
    ],
)
def test_best_source__chooses_the_source_that_counts_copies(
    open_mock: OpenMock, card: MockCard, old_driver: bool, name: str | None
) -> None:
    (gpu,), _ = open_mock(card, old_driver=old_driver)
    source, reasons = best_source(gpu)
    assert (source.name if source else None) == name
    assert all(reasons)


def test_open_gpus__replaces_a_partitioned_card_by_its_mig_devices(
    open_mock: OpenMock,
) -> None:
    gpus, _ = open_mock(H100, MIG, A100)
    assert [gpu.title for gpu in gpus] == [
        "GPU 0",
        "GPU 1 MIG device 0",
        "GPU 1 MIG device 1",
        "GPU 2",
    ]
    assert len({gpu.index for gpu in gpus}) == 4
    assert (gpus[0].index, gpus[3].index) == (0, 2)
    described = [gpu.describe() for gpu in gpus[1:3]]
    assert [(one["uuid"], one["capacity_bytes"]) for one in described] == [
        (mig.uuid, mig.total) for mig in MIG.mig_devices
    ]
    assert {one["parent_uuid"] for one in described} == {MIG.uuid}
    assert {one["pci_bus_id"] for one in described} == {"00000000:19:00.0"}
    assert [gpu.read_used_bytes() for gpu in gpus[1:3]] == [
        mig.used for mig in MIG.mig_devices
    ]


def test_open_gpus__keeps_the_mig_devices_of_cuda_visible_devices(
    open_mock: OpenMock,
) -> None:
    open_mock(MIG, H100)
    first, second = (mig.uuid for mig in MIG.mig_devices)
    nvml = Nvml()
    assert [gpu.read_uuid() for gpu in open_gpus(nvml, second).gpus] == [second]
    assert [gpu.read_uuid() for gpu in open_gpus(nvml, f"{first}, {second}").gpus] == [
        first,
        second,
    ]
    for other in ("", "0", "0,1", H100.uuid, "MIG-that-is-gone"):
        assert [gpu.read_uuid() for gpu in open_gpus(nvml, other).gpus] == [
            first,
            second,
            H100.uuid,
        ]


def test_open_gpus__leaves_out_a_lost_card_beside_mig_devices(
    open_mock: OpenMock,
) -> None:
    lost = replace(H100, lost_ns=0)
    open_mock(lost, MIG)
    opened = open_gpus(Nvml(), MIG.mig_devices[0].uuid)
    assert [gpu.title for gpu in opened.gpus] == ["GPU 1 MIG device 0"]
    assert opened.unavailable == ["GPU 0 is not sampled: GPU is lost"]


def test_open_gpus__keeps_a_partitioned_card_without_mig_devices(
    open_mock: OpenMock,
) -> None:
    (gpu,), _ = open_mock(replace(MIG, mig_devices=()))
    assert gpu.title == "GPU 0"
    assert gpu.link_obstacle() is not None


def test_gpu__raises_from_the_moment_when_it_is_lost(open_mock: OpenMock) -> None:
    (gpu,), mock = open_mock(replace(H100, lost_ns=3600 * SECOND_NS))
    readers = (
        gpu.read_used_bytes,
        gpu.read_pcie_counters,
        gpu.read_link,
        GpuStateReader(gpu).read,
        gpu.mig_devices,
    )
    for read in readers:
        read()
    mock.set_time_ns(2**62)
    for read in readers:
        with pytest.raises(GpuLost, match="GPU is lost"):
            read()
