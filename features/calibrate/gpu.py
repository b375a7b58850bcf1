"""Measures a GPU: updates, casts, the fixed cost of a step, arithmetic and memory.
Needs a GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ebbtide.features.calibrate.cpu import CAST_BYTES, KERNEL_BYTES, TorchAdamW
from ebbtide.features.calibrate.record import (
    MIN_RUNS,
    MeasurementRecord,
    Setup,
    Timing,
    measure_time,
)
from ebbtide.machines.machine import GpuCompute

# Launches kernels.
Launch = Callable[[], object]

# DeepSpeed's default subgroup; fewer parameters if the device has little memory.
_PARAMS = 100_000_000
_SMALL_PARAMS = 1024
# Launched together, so that the launch cost on the host is hidden, as in a training
# step.
_LAUNCHED = 8
# How much more work each size has than the one before it, of the sizes that are tried.
_GROWTH = 8


def record_memory(setup: Setup, record: MeasurementRecord) -> None:
    """Record `gpu_memory_bytes`: all memory of the card, whoever uses it."""
    properties = torch.cuda.get_device_properties(setup.device)
    record.rate("gpu_memory_bytes", float(properties.total_memory), properties.name)


def measure_update(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `gpu_update_params_per_s` with torch's fused AdamW and its casts, several
    steps in a row."""
    free, _ = torch.cuda.mem_get_info(setup.device)
    sizes = _sizes(min(_PARAMS, free // (2 * KERNEL_BYTES)))
    device = torch.device("cuda", setup.device)
    params, timing = _time_launches(
        lambda size: TorchAdamW(size, device), sizes, device, setup
    )
    how = f"torch AdamW(fused=True) and its casts, {params / 1e6:.1f} M parameters"
    record.rate(
        "gpu_update_params_per_s", _LAUNCHED * params / timing.seconds, how, timing
    )


def measure_cast(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `gpu_cast_params_per_s`: fp32 to bf16, several casts in a row."""
    free, _ = torch.cuda.mem_get_info(setup.device)
    sizes = _sizes(min(_PARAMS, free // (2 * CAST_BYTES)))
    device = torch.device("cuda", setup.device)

    def prepare(size: int) -> Launch:
        master = torch.ones(size, device=device)
        half = torch.empty_like(master, dtype=torch.bfloat16)
        return lambda: half.copy_(master)

    params, timing = _time_launches(prepare, sizes, device, setup)
    how = f"torch copy_ to bfloat16, {params / 1e6:.1f} M parameters"
    record.rate(
        "gpu_cast_params_per_s", _LAUNCHED * params / timing.seconds, how, timing
    )


def measure_overhead(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `step_overhead_s`.

    Gradient and state of a tiny subgroup are copied up, updated, and copied back.
    """
    step = TorchAdamW(_SMALL_PARAMS, torch.device("cuda", setup.device))
    step()
    on_device = [step.gradient, *step.state]
    on_host = [
        torch.zeros_like(tensor, device="cpu").copy_(tensor).pin_memory()
        for tensor in on_device
    ]

    def round_trip() -> None:
        for target, source in zip(on_device, on_host, strict=True):
            target.copy_(source, non_blocking=True)
        step()
        for target, source in zip(on_host[1:], on_device[1:], strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(setup.device)

    timing = measure_time(round_trip, setup.window_s, setup.ranks)
    how = (
        f"a subgroup of {_SMALL_PARAMS:,} parameters fetched, updated on the GPU and "
        "flushed"
    )
    record.rate("step_overhead_s", timing.seconds, how, timing)


# Type of the operands and precision of fp32 products, by the keys of `flops_per_s`.
# Products accumulate in fp32.
_PRECISIONS: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "float16": (torch.float16, "highest"),
    "bfloat16": (torch.bfloat16, "highest"),
}
# From compute capability 8.0 on.
_NEEDS_AMPERE = ("tf32", "bfloat16")
_AMPERE = (8, 0)
# Rows and columns of the matrices, and bytes of a copy; smaller if the device has
# little memory or is slow.
_MATRIX_SIZE = 8192
_COPY_BYTES = 1 << 30


def measure_compute(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `gpu`: name, compute capability, products of matrices by type, and
    traffic with device memory."""
    device = torch.device("cuda", setup.device)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    free, _ = torch.cuda.mem_get_info(device)
    largest = min(_MATRIX_SIZE, int((free / (2 * 3 * 4)) ** 0.5) // 64 * 64)
    precisions = [
        key for key in _PRECISIONS if capability >= _AMPERE or key not in _NEEDS_AMPERE
    ]
    flops = {}
    for key in precisions:
        flops[key], size, timing = measure_product(device, key, largest, setup)
        record.describe(
            f"gpu.flops_per_s.{key}",
            f"products of two {size} x {size} matrices of random numbers",
            timing,
        )
    memory, copy_bytes, timing = measure_device_memory(
        device, min(_COPY_BYTES, free // 4), setup
    )
    record.describe(
        "gpu.memory_bytes_per_s",
        f"copies of {copy_bytes >> 20} MiB within device memory",
        timing,
    )
    is_cuda = torch.version.hip is None
    record.gpu = GpuCompute(
        name=properties.name,
        compute_capability=f"{capability[0]}.{capability[1]}" if is_cuda else None,
        flops_per_s=flops,
        memory_bytes_per_s=memory,
    )


def measure_product(
    device: torch.device, precision: str, largest: int, setup: Setup
) -> tuple[float, int, Timing]:
    """Return the FLOP/s of products of square matrices, their size and timing.

    A product has 2 size**3 operations.

    Args:
        precision: A key of `flops_per_s`.
        largest: Rows and columns if the device is fast.
    """
    dtype, fp32_precision = _PRECISIONS[precision]

    def prepare(size: int) -> Launch:
        # Products of zeros take less power, so that the clock stays higher than in a
        # job.
        left, right = (
            torch.randn(size, size, device=device).to(dtype) for _ in range(2)
        )
        product = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=product)

    sizes = [largest >> halvings for halvings in (5, 4, 3, 2, 1, 0)]
    with _fp32_precision(fp32_precision):
        size, timing = _time_launches(prepare, sizes, device, setup)
    return _LAUNCHED * 2.0 * size**3 / timing.seconds, size, timing


def measure_device_memory(
    device: torch.device, largest: int, setup: Setup
) -> tuple[float, int, Timing]:
    """Return the bytes/s read and written by copies within a device's memory.

    Return also the bytes of one copy, and their timing; `largest`: bytes of a copy if
    the device is fast.
    """

    def prepare(nbytes: int) -> Launch:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    nbytes, timing = _time_launches(prepare, _sizes(largest), device, setup)
    return _LAUNCHED * 2.0 * nbytes / timing.seconds, nbytes, timing


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 products, and restore it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _sizes(largest: int) -> list[int]:
    """Return sizes to try of what has as much work as elements."""
    return [largest // _GROWTH**2, largest // _GROWTH, largest]


def _time_launches(
    prepare: Callable[[int], Launch],
    sizes: Sequence[int],
    device: torch.device,
    setup: Setup,
) -> tuple[int, Timing]:
    """Measure calls that launch kernels, several in a row, of the largest size whose
    runs fit the window.

    Args:
        prepare: Returns the call of a size.
        sizes: Sizes to try, ascending; each has `_GROWTH` times the work of the one
            before.
    """
    for size in sizes:
        run = _repeated(prepare(size), device)
        # The first run also allocates memory and loads kernels.
        run()
        begin_s = time.perf_counter()
        run()
        run_s = time.perf_counter() - begin_s
        if _GROWTH * run_s * (1 + MIN_RUNS) > setup.window_s:
            break
    return size, measure_time(run, setup.window_s, setup.ranks)


def _repeated(launch: Launch, device: torch.device) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_LAUNCHED):
            launch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run
