"""What the GPU does of an update, and what a step costs however little it updates. Needs a GPU."""

from __future__ import annotations

import torch

from ebbtide.interleave.calibrate.adamw import KEPT_BYTES, TorchAdamW
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import timed

# A subgroup, as DeepSpeed's are by default; fewer where the device has little room.
_PARAMS = 100_000_000
_SMALL = 1024
# Launched together, so that what a launch costs the host is hidden, as it is in a training step.
_AT_ONCE = 8


def memory(setup: Setup, record: Record) -> None:
    """gpu_memory_bytes: of the card, whoever uses it."""
    properties = torch.cuda.get_device_properties(setup.device)
    record.rate("gpu_memory_bytes", float(properties.total_memory), properties.name)


def update(setup: Setup, record: Record) -> None:
    """gpu_update_params_per_s: torch's fused AdamW with its casts, several steps in a row."""
    free, _ = torch.cuda.mem_get_info(setup.device)
    params = min(_PARAMS, free // (2 * KEPT_BYTES))
    step = TorchAdamW(params, torch.device("cuda", setup.device))

    def steps() -> None:
        for _ in range(_AT_ONCE):
            step()
        torch.cuda.synchronize(setup.device)

    timing = timed(steps, setup.window_s, setup.ranks)
    how = f"torch AdamW(fused=True) and its casts, {params / 1e6:.1f} M parameters"
    record.rate("gpu_update_params_per_s", _AT_ONCE * params / timing.seconds, how, timing)


def overhead(setup: Setup, record: Record) -> None:
    """step_overhead_s: the whole way of a subgroup of 1,024 parameters, from the call until all has ended: gradient and
    state up from pinned memory, fused AdamW with its casts, state down."""
    step = TorchAdamW(_SMALL, torch.device("cuda", setup.device))
    step()
    there = [step.gradient, *step.state]
    here = [torch.zeros_like(tensor, device="cpu").copy_(tensor).pin_memory() for tensor in there]

    def whole_way() -> None:
        for target, source in zip(there, here, strict=True):
            target.copy_(source, non_blocking=True)
        step()
        for target, source in zip(here[1:], there[1:], strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(setup.device)

    timing = timed(whole_way, setup.window_s, setup.ranks)
    how = f"a subgroup of {_SMALL:,} parameters fetched, updated on the GPU and flushed"
    record.rate("step_overhead_s", timing.seconds, how, timing)
