"""Measures the rates of a machine in a fraction of a second, for a first plan; the
steps of the job correct them."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from ebbtide import host_limits
from ebbtide.interleave.engine.devices.device import Device, Direction, copy_now
from ebbtide.interleave.engine.numerics.host_arrays import row_stride
from ebbtide.interleave.engine.numerics.kernels import CpuKernel
from ebbtide.interleave.engine.numerics.reference import TensorUpdate
from ebbtide.interleave.engine.rules.adamw import ADAMW
from ebbtide.interleave.engine.rules.rule import UpdateRule
from ebbtide.interleave.engine.runtime.layout import (
    Subgroup,
    state_elements,
    state_rows,
    state_shape,
)
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import GRAD_BYTES, PARAM_BYTES

# Number of parameters whose state is copied and updated on the GPU. On the CPU more are
# updated: see _cpu_params.
_PARAMS = 2 << 20
# Bytes of the last-level caches where the host does not report them.
_CACHE_BYTES = 32 << 20
# States on the device: copied to it, copied from it, and the memory of one for a
# gradient and a parameter.
_DEVICE_STATES = 3
# Number of measurements, and seconds after which there is none; the shortest counts.
_ROUNDS, _MAX_S = 3, 0.25


def probe(
    device: Device,
    kernel: CpuKernel,
    params: int,
    device_bytes: float | None,
    out_of_place: bool = False,
    host_bytes: float | None = None,
    rule: UpdateRule = ADAMW,
) -> Machine:
    """Measure the rates of a device and the CPU with at most `params` parameters and
    `device_bytes` (None: no limit). `host_memory_bytes_per_s` is the traffic of updates
    and copies at once, or twice that of the update alone if they did not slow each
    other down. `host_bytes`: host memory of this rank; None: what is available."""
    own_rule, rule = rule, rule.with_masters
    # Updates of fp32 parameters that are their own masters take as much memory traffic
    # as with masters of bfloat16.
    is_half = not own_rule.has_masters and rule.rounds
    state_bytes = own_rule.state_bytes if is_half else rule.state_bytes
    max_params = (
        params
        if device_bytes is None
        else int(device_bytes / (_DEVICE_STATES * state_bytes))
    )
    cpu_params, params = (
        min(params, _cpu_params(host_bytes, state_bytes)),
        max(1, min(params, _PARAMS, max_params)),
    )
    scalars = rule.scalars(rule.defaults, 1)
    if rule.whole_update is not None:
        # Transforms would take too long: the rates are those of the elements.
        scalars = rule.whole_update.parts(scalars, (1, 1)).scalars
    one_pass_bytes = GRAD_BYTES + 2 * state_bytes + (2 if is_half else 1) * PARAM_BYTES
    half = torch.zeros(cpu_params, dtype=torch.bfloat16, device="cpu")
    own = Subgroup(params, torch.bfloat16, (), torch.bfloat16, rule=rule)
    host_states = [
        device.allocate_host((state_elements(own),), torch.float32) for _ in range(2)
    ]
    blocks = ExitStack()

    def allocate(params: int, rows: int) -> torch.Tensor:
        block = device.allocate_state(params, rows)
        blocks.callback(device.release, block)
        return block

    nbytes = host_states[0].nbytes
    state, out = _host_state(rule, cpu_params), half.clone()

    target = out
    if is_half:
        state, target = [out, *state[1:]], None

    def update_on_cpu() -> None:
        kernel.update(half, state, target, scalars, rule=rule)

    def update_beside(new_state: list[torch.Tensor]) -> Callable[[], None]:
        if is_half:
            new_state[0] = out.clone()
        return lambda: kernel.update_beside(
            half, state, new_state, target, [(0, cpu_params, scalars)], rule=rule
        )

    def update_split(part: torch.Tensor) -> Callable[[], None]:
        return lambda: kernel.update(
            half, (part, *state[1:]), out, scalars, rule=own_rule
        )

    def copy(direction: Direction, count: int = 1) -> Callable[[], None]:
        h2d = direction == "h2d"
        pair = (
            (host_states[0], device_states[0])
            if h2d
            else (device_states[1], host_states[1])
        )
        return lambda: copy_now(device, direction, [pair] * count)

    def update_on_gpu() -> None:
        device.update([TensorUpdate(device_grad, updated, device_out, scalars, rule)])
        device.record("gpu").synchronize()

    with blocks:
        device_states = [allocate(state_elements(own), 1).view(-1) for _ in range(2)]
        device_grad, device_out = (
            row.view(torch.bfloat16)[:params] for row in allocate(params, 2)
        )
        updated = state_rows(device_states[0].view(state_shape(own)), own)
        for device_state in device_states:
            copy_now(device, "h2d", [(host_states[0], device_state)])
        copy_now(device, "h2d", [(half[:params], device_grad)])
        cpu_s = _min_seconds(update_on_cpu)
        share = (
            cpu_s / _min_seconds(update_beside(_host_state(rule, cpu_params)))
            if out_of_place
            else None
        )
        ratio = None
        if own_rule.split is not None:
            part = torch.zeros(cpu_params, dtype=own_rule.split.dtype, device="cpu")
            ratio = cpu_s / _min_seconds(update_split(part))
        h2d_s, d2h_s = _min_seconds(copy("h2d")), _min_seconds(copy("d2h"))
        gpu_s = _min_seconds(update_on_gpu)
        # As many copies as take about as long as the update.
        copies = max(1, int(cpu_s / max(h2d_s, d2h_s)))
        together_s = _min_seconds(
            lambda: _run_at_once(
                update_on_cpu, copy("h2d", copies), copy("d2h", copies)
            )
        )
    traffic_bytes = one_pass_bytes * cpu_params + 2 * nbytes * copies
    longest_s = max(cpu_s, copies * h2d_s, copies * d2h_s)
    slowed_down = together_s > 1.2 * longest_s
    memory_bytes_per_s = (
        traffic_bytes / together_s
        if slowed_down
        else 2 * one_pass_bytes * cpu_params / cpu_s
    )
    return Machine(
        name="probed",
        host_memory_bytes=_host_memory_bytes(),
        h2d_bytes_per_s=nbytes / h2d_s,
        d2h_bytes_per_s=nbytes / d2h_s,
        h2d_pageable_bytes_per_s=nbytes / h2d_s,
        d2h_pageable_bytes_per_s=nbytes / d2h_s,
        host_memory_bytes_per_s=memory_bytes_per_s,
        cpu_update_params_per_s=cpu_params / cpu_s,
        cpu_cast_params_per_s=2 * cpu_params / cpu_s,
        cpu_out_of_place_share=None if share is None else min(1.0, share),
        cpu_remainder_ratio=ratio,
        gpu_update_params_per_s=params / gpu_s,
        step_overhead_s=0.0,
    )


def _cpu_params(host_bytes: float | None, state_bytes: float) -> int:
    """Return the number of parameters whose update takes four times the caches, or an
    eighth of this rank's memory."""
    nbytes = min(
        4 * (host_limits.cache_bytes() or _CACHE_BYTES),
        (host_bytes or _host_memory_bytes() or math.inf) / 8,
    )
    return max(_PARAMS, int(nbytes / (state_bytes + GRAD_BYTES + PARAM_BYTES)))


def _host_state(rule: UpdateRule, params: int) -> list[torch.Tensor]:
    if rule.moment_dtype != torch.float32:
        return list(rule.zero_rows(params))
    return list(
        torch.zeros(
            (1 + len(rule.moments), row_stride(params)),
            dtype=torch.float32,
            device="cpu",
        )[:, :params]
    )


def _host_memory_bytes() -> float | None:
    """Return this rank's share of the host memory that is available."""
    available = host_limits.available_bytes()
    return None if available is None else available / host_limits.local_ranks()


def _min_seconds(work: Callable[[], object]) -> float:
    work()
    times_s: list[float] = []
    while len(times_s) < _ROUNDS and sum(times_s) < _MAX_S:
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return float(np.min(times_s))


def _run_at_once(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
