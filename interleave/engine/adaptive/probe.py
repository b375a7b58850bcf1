"""A machine's rates at a glance, for a first plan; the steps themselves correct them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from ebbtide.interleave.engine.devices.device import Device, Direction
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES, CpuKernel
from ebbtide.interleave.engine.numerics.reference import Hyper
from ebbtide.machines.machine import Machine

_PARAMS = 2 << 20
# Of device memory, a parameter: state that comes, state that goes, and room for a gradient and a parameter.
_DEVICE_BYTES = 3 * 12
# Each thing is done this often; the quickest counts.
_ROUNDS = 3


def probe(device: Device, kernel: CpuKernel, params: int, room: float | None) -> Machine:
    """Rates of this device and CPU over the state of so many parameters, or some million, or as many as fit into `room`
    bytes of the device: a fraction of a second. host_memory: what
    update and copies carried together, or twice what the update alone did where they did not slow each other."""
    fits = params if room is None else int(room / _DEVICE_BYTES)
    params = max(1, min(params, _PARAMS, fits))
    scalars = Hyper().scalars(1)
    half = torch.zeros(params, dtype=torch.bfloat16, device="cpu")
    host = [device.host((3, params), torch.float32) for _ in range(2)]
    there = [device.state(params) for _ in range(2)]
    scratch = device.state(params)
    grad, written = (row.view(torch.bfloat16)[:params] for row in scratch[:2])
    nbytes = host[0].nbytes
    state, out = torch.zeros((3, params), dtype=torch.float32, device="cpu"), half.clone()
    block = there[0]

    def on_cpu() -> None:
        kernel.update(half, state[0], state[1], state[2], out, scalars)

    def copy(direction: Direction) -> Callable[[], None]:
        pair = (host[0], there[0]) if direction == "h2d" else (there[1], host[1])
        return lambda: device.copy(direction, [pair])

    try:
        for room in there:
            device.copy("h2d", [(host[0], room)])
        device.copy("h2d", [(half, grad)])
        cpu = _quickest(on_cpu)
        up, down = _quickest(copy("h2d")), _quickest(copy("d2h"))
        gpu = _quickest(lambda: device.update(grad, block[0], block[1], block[2], written, scalars))
        together = _quickest(lambda: _at_once(on_cpu, copy("h2d"), copy("d2h")))
    finally:
        for tensor in (*there, scratch):
            device.release(tensor)
    traffic = ONE_PASS_BYTES * params + 2 * nbytes
    alone = max(cpu, up, down)
    memory = traffic / together if together > 1.2 * alone else 2 * ONE_PASS_BYTES * params / cpu
    return Machine(
        name="probed",
        h2d_bytes_per_s=nbytes / up,
        d2h_bytes_per_s=nbytes / down,
        h2d_pageable_bytes_per_s=nbytes / up,
        d2h_pageable_bytes_per_s=nbytes / down,
        host_memory_bytes_per_s=memory,
        cpu_update_params_per_s=params / cpu,
        cpu_cast_params_per_s=2 * params / cpu,
        gpu_update_params_per_s=params / gpu,
        step_overhead_s=0.0,
    )


def _quickest(doing: Callable[[], object]) -> float:
    doing()
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        doing()
        taken.append(time.perf_counter() - begin)
    return float(np.min(taken))


def _at_once(*doings: Callable[[], object]) -> None:
    threads = [threading.Thread(target=doing) for doing in doings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
