"""What the policies run on: this machine's GPU, or an emulated device beside this machine's CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ebbtide import host_limits
from ebbtide.interleave.calibrate import cpu, host_memory
from ebbtide.interleave.calibrate.adamw import KEPT_BYTES, OnePassAdamW
from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.run import calibrate
from ebbtide.interleave.calibrate.timing import timed
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES
from ebbtide.machines.machine import Machine

# Slow enough to leave the cores to the updates, which an emulated device shares with them.
LINK_BYTES_PER_S = 1e9
_GPU_PARAMS_PER_S = 4e8
_WINDOW_S = 0.25
_CALIBRATE_S = 15.0
_NEEDED = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "h2d_pageable_bytes_per_s",
    "d2h_pageable_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
    "cpu_cast_params_per_s",
    "gpu_update_params_per_s",
)


@dataclass(frozen=True)
class Box:
    """link_bytes_per_s: of an emulated device, each way; None where there is a GPU. memory_budget: bytes of device
    memory for the optimizer's state. threads: of the CPU's updates; None: as many as it likes."""

    device: torch.device
    name: str
    machine: Machine
    memory_budget: float
    link_bytes_per_s: float | None
    threads: int | None

    @property
    def emulated(self) -> bool:
        return self.link_bytes_per_s is not None

    def make_device(self) -> EmulatedDevice | None:
        """A device for one run; None where the optimizer finds it by itself."""
        if self.link_bytes_per_s is None:
            return None
        return EmulatedDevice(self.memory_budget, self.link_bytes_per_s, self.link_bytes_per_s, _GPU_PARAMS_PER_S)


def find_box(params: int, memory_budget: float, link_bytes_per_s: float | None, machine: Machine | None) -> Box:
    """The GPU, or, where there is none or a link's rate is given, an emulated device. machine: what to predict with,
    else it is measured; the link and the GPU of an emulated device are what they are set to in any case. params: of the
    job. Raises MachineError where a rate is not known."""
    if torch.cuda.is_available() and link_bytes_per_s is None:
        found = machine or calibrate(Ranks(), _CALIBRATE_S, "this machine")
        box = Box(torch.device("cuda"), torch.cuda.get_device_name(), found, memory_budget, None, None)
    else:
        link = link_bytes_per_s or LINK_BYTES_PER_S
        # A core is left to what stands for the device.
        threads = max(1, host_limits.cores() - 1)
        found = machine or _measured(params, threads)
        found = replace(
            found,
            name=f"{found.name} with an emulated device",
            gpu_memory_bytes=memory_budget,
            h2d_bytes_per_s=link,
            d2h_bytes_per_s=link,
            h2d_pageable_bytes_per_s=link,
            d2h_pageable_bytes_per_s=link,
            duplex_bytes_per_s=None,
            gpu_update_params_per_s=_GPU_PARAMS_PER_S,
        )
        box = Box(torch.device("cpu"), "emulated device", found, memory_budget, link, threads)
    box.machine.need(_NEEDED, "compare")
    return box


def _measured(params: int, threads: int) -> Machine:
    """The CPU's rates, over as much memory as the job's state takes: caches hold as much of it, too."""
    cores = host_limits.cores()
    record = Record()
    setup = Setup(Ranks(), cores, cores, KEPT_BYTES * params, _WINDOW_S, None)
    before = torch.get_num_threads()
    try:
        host_memory.bandwidth(setup, record)
        cpu.cast(setup, record)
    finally:
        torch.set_num_threads(before)
    timing = timed(OnePassAdamW(params, threads), _WINDOW_S, setup.ranks)
    rate = params / timing.seconds
    how = f"one pass by numba (threads: {threads})"
    record.rate("cpu_update_params_per_s", rate, how, timing)
    record.host_traffic(ONE_PASS_BYTES * rate, how, timing)
    return Machine(name="this machine", **record.rates, more={"measured": record.measured})
