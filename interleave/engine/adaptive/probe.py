"""Measures the rates of a machine in a fraction of a second, for a first plan.

The steps of the job correct them.
"""

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
from ebbtide.interleave.engine.rules.rule import Scalars, UpdateRule
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
    `device_bytes` (None: no limit).

    `host_memory_bytes_per_s` is the traffic of updates and copies at once, or twice the
    traffic of the update alone if they did not slow each other down. `host_bytes`: host
    memory of this rank; None: what is available."""
    state_bytes = _state_bytes(rule)
    most_params = params
    if device_bytes is not None:
        most_params = int(device_bytes / (_DEVICE_STATES * state_bytes))
    cpu_params = min(params, _cpu_params(host_bytes, state_bytes))
    host = _HostUpdate(kernel, rule, cpu_params)
    gpu_params = max(1, min(params, _PARAMS, most_params))
    with ExitStack() as blocks:
        gpu = _DeviceUpdate(device, rule, gpu_params, blocks)
        cpu_s = _min_seconds(host.run)
        share = ratio = None
        if out_of_place:
            share = min(1.0, cpu_s / _min_seconds(host.beside()))
        if rule.split is not None:
            ratio = cpu_s / _min_seconds(host.with_remainder())
        h2d_s, d2h_s = _min_seconds(gpu.copy("h2d")), _min_seconds(gpu.copy("d2h"))
        gpu_s = _min_seconds(gpu.run)
        # As many copies as take about as long as the update.
        copies = max(1, int(cpu_s / max(h2d_s, d2h_s)))
        works = host.run, gpu.copy("h2d", copies), gpu.copy("d2h", copies)
        together_s = _min_seconds(lambda: _run_at_once(*works))
    one_pass_bytes = cpu_params * host.traffic_bytes
    memory_bytes_per_s = 2 * one_pass_bytes / cpu_s
    if together_s > 1.2 * max(cpu_s, copies * h2d_s, copies * d2h_s):
        traffic_bytes = one_pass_bytes + 2 * gpu.nbytes * copies
        memory_bytes_per_s = traffic_bytes / together_s
    h2d_bytes_per_s, d2h_bytes_per_s = gpu.nbytes / h2d_s, gpu.nbytes / d2h_s
    return Machine(
        name="probed",
        host_memory_bytes=_host_memory_bytes(),
        h2d_bytes_per_s=h2d_bytes_per_s,
        d2h_bytes_per_s=d2h_bytes_per_s,
        h2d_pageable_bytes_per_s=h2d_bytes_per_s,
        d2h_pageable_bytes_per_s=d2h_bytes_per_s,
        host_memory_bytes_per_s=memory_bytes_per_s,
        cpu_update_params_per_s=cpu_params / cpu_s,
        cpu_cast_params_per_s=2 * cpu_params / cpu_s,
        cpu_out_of_place_share=share,
        cpu_remainder_ratio=ratio,
        gpu_update_params_per_s=gpu_params / gpu_s,
        step_overhead_s=0.0,
    )


def _is_half(rule: UpdateRule) -> bool:
    """Return whether fp32 parameters are their own masters, in a rule that rounds.

    Their updates take as much memory traffic as with masters of bfloat16.
    """
    return not rule.has_masters and rule.with_masters.rounds


def _state_bytes(rule: UpdateRule) -> float:
    return rule.state_bytes if _is_half(rule) else rule.with_masters.state_bytes


def _first_scalars(rule: UpdateRule) -> Scalars:
    scalars = rule.scalars(rule.defaults, 1)
    if rule.whole_update is None:
        return scalars
    # Transforms would take too long: the rates describe the elements.
    parts: Scalars = rule.whole_update.parts(scalars, (1, 1)).scalars
    return parts


class _HostUpdate:
    """Updates of parameters on the CPU.

    `traffic_bytes` is the memory traffic of a parameter.
    """

    def __init__(self, kernel: CpuKernel, rule: UpdateRule, params: int) -> None:
        self._kernel = kernel
        self._own_rule, self._rule = rule, rule.with_masters
        self._is_half = _is_half(rule)
        params_moved = 2 if self._is_half else 1
        self.traffic_bytes = (
            GRAD_BYTES + 2 * _state_bytes(rule) + params_moved * PARAM_BYTES
        )
        self._scalars = _first_scalars(self._rule)
        self._grad = torch.zeros(params, dtype=torch.bfloat16, device="cpu")
        self._state, self._out = _host_state(self._rule, params), self._grad.clone()
        self._target: torch.Tensor | None = self._out
        if self._is_half:
            self._state, self._target = [self._out, *self._state[1:]], None

    def run(self) -> None:
        """Update in place."""
        self._kernel.update(
            self._grad, self._state, self._target, self._scalars, rule=self._rule
        )

    def beside(self) -> Callable[[], None]:
        """Return an update that writes new state beside the old one."""
        params = self._grad.numel()
        new_state = _host_state(self._rule, params)
        if self._is_half:
            new_state[0] = self._out.clone()
        return lambda: self._kernel.update_beside(
            self._grad,
            self._state,
            new_state,
            self._target,
            [(0, params, self._scalars)],
            rule=self._rule,
        )

    def with_remainder(self) -> Callable[[], None]:
        """Return an update of masters that are the parameter and a remainder."""
        assert self._own_rule.split is not None
        dtype = self._own_rule.split.dtype
        part = torch.zeros(self._grad.numel(), dtype=dtype, device="cpu")
        state = (part, *self._state[1:])
        return lambda: self._kernel.update(
            self._grad, state, self._out, self._scalars, rule=self._own_rule
        )


class _DeviceUpdate:
    """An update of parameters on the GPU, and copies of their state.

    The state has `nbytes`; `blocks` releases its memory.
    """

    def __init__(
        self, device: Device, rule: UpdateRule, params: int, blocks: ExitStack
    ) -> None:
        self._device = device
        rule = rule.with_masters
        own = Subgroup(params, torch.bfloat16, (), torch.bfloat16, rule=rule)
        elements = state_elements(own)

        def allocate(params: int, rows: int) -> torch.Tensor:
            block = device.allocate_state(params, rows)
            blocks.callback(device.release, block)
            return block

        self._host = [
            device.allocate_host((elements,), torch.float32) for _ in range(2)
        ]
        self.nbytes = self._host[0].nbytes
        self._states = [allocate(elements, 1).view(-1) for _ in range(2)]
        grad, out = (row.view(torch.bfloat16)[:params] for row in allocate(params, 2))
        for state in self._states:
            copy_now(device, "h2d", [(self._host[0], state)])
        zeros = torch.zeros(params, dtype=torch.bfloat16, device="cpu")
        copy_now(device, "h2d", [(zeros, grad)])
        rows = state_rows(self._states[0].view(state_shape(own)), own)
        self._update = TensorUpdate(grad, rows, out, _first_scalars(rule), rule)

    def run(self) -> None:
        """Update, and wait for it."""
        self._device.update([self._update])
        self._device.record("gpu").synchronize()

    def copy(self, direction: Direction, count: int = 1) -> Callable[[], None]:
        """Return a function that copies the state `count` times."""
        pair = self._host[0], self._states[0]
        if direction == "d2h":
            pair = self._states[1], self._host[1]
        return lambda: copy_now(self._device, direction, [pair] * count)


def _cpu_params(host_bytes: float | None, state_bytes: float) -> int:
    """Return the number of parameters for a measured update on the CPU.

    Their update takes four times the caches, or an eighth of this rank's memory.
    """
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
