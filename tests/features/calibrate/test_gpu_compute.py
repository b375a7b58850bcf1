"""Measurement of arithmetic and device memory. The same code runs on the CPU here, and
on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ebbtide.features.calibrate import gpu
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import MeasurementRecord, Setup, Timing
from ebbtide.machines.machine import GpuCompute

CPU = torch.device("cpu")
SETUP = Setup(
    Ranks(), threads=1, cores=1, working_set=1 << 20, window_s=0.0, device=None
)


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_measure_product__counts_the_operations_of_all_products(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[tuple[torch.dtype, str]] = []
    product_of = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        products.append((left.dtype, torch.get_float32_matmul_precision()))
        return product_of(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    before = torch.get_float32_matmul_precision()
    flops_per_s, size, timing = gpu.measure_product(CPU, precision, 64, SETUP)
    assert size == 2
    # One run shows how long another takes, and one before each is not measured.
    in_a_run = len(products) / (timing.runs + 3)
    assert flops_per_s * timing.seconds == pytest.approx(in_a_run * 2 * size**3)
    dtype = (
        torch.float32 if precision in ("float32", "tf32") else getattr(torch, precision)
    )
    assert set(products) == {(dtype, "high" if precision == "tf32" else "highest")}
    assert torch.get_float32_matmul_precision() == before


def test_measure_device_memory__counts_bytes_read_and_written() -> None:
    bytes_per_s, size, timing = gpu.measure_device_memory(CPU, 1 << 20, SETUP)
    assert size == 1 << 14
    assert bytes_per_s * timing.seconds == pytest.approx(gpu._LAUNCHED * 2 * size)


@pytest.mark.parametrize(
    ("window_s", "measured"), [(0.0, 1), (31.0, 1), (32.0, 8), (255.0, 8), (256.0, 64)]
)
def test_time_launches__measures_the_largest_size_whose_runs_fit_the_window(
    window_s: float, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def prepare(size: int) -> gpu.Launch:
        """Return a call of which a run takes as many seconds as its size."""

        def launch() -> None:
            nonlocal now_s
            now_s += size / gpu._LAUNCHED

        return launch

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    size, timing = gpu._time_launches(
        prepare, [1, 8, 64], CPU, replace(SETUP, window_s=window_s)
    )
    assert (size, timing.seconds) == (measured, pytest.approx(measured))


def test_record__a_gpu_and_how_it_was_measured_become_part_of_the_file() -> None:
    record = MeasurementRecord()
    record.describe("gpu.memory_bytes_per_s", "copies", Timing(0.1, 3, 0.02))
    assert record.measured == {
        "gpu.memory_bytes_per_s": {"how": "copies", "runs": 3, "spread": 0.02}
    }
    assert record.rates == {}


@pytest.fixture(scope="module")
def compute() -> GpuCompute:
    record = MeasurementRecord()
    gpu.measure_compute(replace(SETUP, device=0, window_s=0.3), record)
    assert record.gpu is not None
    assert set(record.measured) == {
        "gpu.memory_bytes_per_s",
        *(f"gpu.flops_per_s.{precision}" for precision in record.gpu.flops_per_s),
    }
    return record.gpu


@pytest.mark.gpu
def test_measure_compute__measures_each_precision(compute: GpuCompute) -> None:
    assert compute.name == torch.cuda.get_device_name(0)
    assert (
        {"float32", "float16"}
        <= set(compute.flops_per_s)
        <= {"float32", "tf32", "float16", "bfloat16"}
    )
    assert min(compute.flops_per_s.values()) > 0


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_measure_compute__has_rates_of_a_gpu(compute: GpuCompute) -> None:
    assert compute.memory_bytes_per_s is not None
    assert 1e10 < compute.memory_bytes_per_s < 2e13
    assert compute.flops_per_s["float16"] > compute.flops_per_s["float32"] > 1e12
