"""Measures updates and casts on the GPU, and the fixed cost of a step. Needs a GPU."""

from __future__ import annotations

import torch

from ebbtide.interleave.calibrate.adamw import CAST_BYTES, KERNEL_BYTES, TorchAdamW
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import measure_time

# DeepSpeed's default subgroup; fewer parameters if the device has little memory.
_PARAMS = 100_000_000
_SMALL_PARAMS = 1024
# Launched together, so that the launch cost on the host is hidden, as in a training step.
_LAUNCHED_STEPS = 8


def record_memory(setup: Setup, record: Record) -> None:
    """Record `gpu_memory_bytes`: all memory of the card, whoever uses it."""
    properties = torch.cuda.get_device_properties(setup.device)
    record.rate("gpu_memory_bytes", float(properties.total_memory), properties.name)


def measure_update(setup: Setup, record: Record) -> None:
    """Measure `gpu_update_params_per_s`: torch's fused AdamW with its casts, several steps in a row."""
    free, _ = torch.cuda.mem_get_info(setup.device)
    params = min(_PARAMS, free // (2 * KERNEL_BYTES))
    step = TorchAdamW(params, torch.device("cuda", setup.device))

    def steps() -> None:
        for _ in range(_LAUNCHED_STEPS):
            step()
        torch.cuda.synchronize(setup.device)

    timing = measure_time(steps, setup.window_s, setup.ranks)
    how = f"torch AdamW(fused=True) and its casts, {params / 1e6:.1f} M parameters"
    record.rate("gpu_update_params_per_s", _LAUNCHED_STEPS * params / timing.seconds, how, timing)


def measure_cast(setup: Setup, record: Record) -> None:
    """Measure `gpu_cast_params_per_s`: fp32 to bf16, several casts in a row."""
    free, _ = torch.cuda.mem_get_info(setup.device)
    params = min(_PARAMS, free // (2 * CAST_BYTES))
    master = torch.ones(params, device=f"cuda:{setup.device}")
    half = torch.empty_like(master, dtype=torch.bfloat16)

    def casts() -> None:
        for _ in range(_LAUNCHED_STEPS):
            half.copy_(master)
        torch.cuda.synchronize(setup.device)

    timing = measure_time(casts, setup.window_s, setup.ranks)
    how = f"torch copy_ to bfloat16, {params / 1e6:.1f} M parameters"
    record.rate("gpu_cast_params_per_s", _LAUNCHED_STEPS * params / timing.seconds, how, timing)


def measure_overhead(setup: Setup, record: Record) -> None:
    """Measure `step_overhead_s`: the whole update of a subgroup of 1,024 parameters, from the call to its end.

    It copies gradient and state from pinned memory to the device, runs fused AdamW with its casts, and copies the state
    back.
    """
    step = TorchAdamW(_SMALL_PARAMS, torch.device("cuda", setup.device))
    step()
    on_device = [step.gradient, *step.state]
    on_host = [torch.zeros_like(tensor, device="cpu").copy_(tensor).pin_memory() for tensor in on_device]

    def round_trip() -> None:
        for target, source in zip(on_device, on_host, strict=True):
            target.copy_(source, non_blocking=True)
        step()
        for target, source in zip(on_host[1:], on_device[1:], strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(setup.device)

    timing = measure_time(round_trip, setup.window_s, setup.ranks)
    how = f"a subgroup of {_SMALL_PARAMS:,} parameters fetched, updated on the GPU and flushed"
    record.rate("step_overhead_s", timing.seconds, how, timing)
