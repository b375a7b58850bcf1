"""Measures the arithmetic and the memory of a GPU: the object `gpu` of a machine file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import Timing, measure_time
from ebbtide.machines.gpu_compute import GpuCompute

# Type of the operands and precision of fp32 products, by the keys of `flops_per_s`. Products accumulate in fp32.
_PRECISIONS: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
}
# From compute capability 8.0 on.
_NEEDS_AMPERE = ("tf32", "bfloat16")
_AMPERE = (8, 0)
# Rows and columns of the matrices, and bytes of a copy; smaller if the device has little memory.
_MATRIX_SIZE = 8192
_COPY_BYTES = 1 << 30
_LAUNCHED = 8


def measure_compute(setup: Setup, record: Record) -> None:
    """Measure `gpu`: name, compute capability, products of matrices by type, and traffic with device memory."""
    device = torch.device("cuda", setup.device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_MATRIX_SIZE, int((free / (2 * 3 * 4)) ** 0.5) // 64 * 64)
    precisions = [key for key in _PRECISIONS if capability >= _AMPERE or key not in _NEEDS_AMPERE]
    flops = {}
    for key in precisions:
        flops[key], timing = measure_product(device, key, size, setup)
        record.describe(f"gpu.flops_per_s.{key}", f"products of two {size} x {size} matrices of random numbers", timing)
    copy_bytes = min(_COPY_BYTES, free // 4)
    memory, timing = measure_device_memory(device, copy_bytes, setup)
    record.describe("gpu.memory_bytes_per_s", f"copies of {copy_bytes >> 20} MiB within device memory", timing)
    is_cuda = torch.version.hip is None
    record.gpu = GpuCompute(
        name=properties.name,
        compute_capability=f"{capability[0]}.{capability[1]}" if is_cuda else None,
        flops_per_s=flops,
        memory_bytes_per_s=memory,
    )


def measure_product(device: torch.device, precision: str, size: int, setup: Setup) -> tuple[float, Timing]:
    """Measure products of square matrices.

    Args:
        device: The device.
        precision: A key of `flops_per_s`: `float32`, `tf32`, `float16` or `bfloat16`.
        size: Rows and columns.
        setup: Duration, and the ranks that measure at the same time.

    Returns:
        FLOP/s, counting 2 size**3 a product, and the timing of some products in a row.
    """
    dtype, fp32_precision = _PRECISIONS[precision]
    # Products of zeros take less power, so that the clock stays higher than in a job.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def run() -> None:
        for _ in range(_LAUNCHED):
            torch.mm(left, right, out=product)
        _synchronize(device)

    with _fp32_precision(fp32_precision):
        timing = measure_time(run, setup.window_s, setup.ranks)
    return _LAUNCHED * 2.0 * size**3 / timing.seconds, timing


def measure_device_memory(device: torch.device, nbytes: int, setup: Setup) -> tuple[float, Timing]:
    """Measure copies within the memory of a device.

    Args:
        device: The device.
        nbytes: Bytes of a copy.
        setup: Duration, and the ranks that measure at the same time.

    Returns:
        Bytes read and written per second, and the timing of some copies in a row.
    """
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(_LAUNCHED):
            target.copy_(source)
        _synchronize(device)

    timing = measure_time(run, setup.window_s, setup.ranks)
    return _LAUNCHED * 2.0 * nbytes / timing.seconds, timing


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products, and restore it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
