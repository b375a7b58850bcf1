"""The rates of an emulated device that stands for the GPU of a machine."""

from __future__ import annotations

import time

import torch

from ebbtide.errors import UserError
from ebbtide.machines.machine import Machine

_SIZE, _ROUNDS = 768, 5
_MIN_RATE = 1e6


def scaled_link(machine: Machine) -> float:
    """Return the rate of an emulated link, in bytes/s.

    This CPU computes slower than the machine's GPU; the link is slower by as much, so
    that a job is bound by the link as it would be there. Raises UserError for a machine
    without the rates."""
    peaks = machine.gpu.flops_per_s if machine.gpu is not None else {}
    peak = peaks.get("bfloat16") or peaks.get("float16") or peaks.get("float32")
    if not peak or not machine.h2d_bytes_per_s:
        raise UserError(
            f"machine {machine.name} has no rate of its GPU's arithmetic, or of its "
            "link: give the emulated link a rate with --emulate-link"
        )
    return max(_MIN_RATE, machine.h2d_bytes_per_s * _cpu_flops_per_s() / peak)


def _cpu_flops_per_s() -> float:
    """Measure the rate of matrix products on this CPU, the best of some rounds."""
    matrix = torch.ones(_SIZE, _SIZE)
    times = []
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - begin_s)
    return 2.0 * _SIZE**3 / min(times)
