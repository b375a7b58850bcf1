"""The device and machine that policies run on: this machine's GPU, or an emulated
device and this machine's CPU."""

import statistics
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ebbtide import host_limits, seams
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.machines.machine import Machine

# Slow enough to leave the cores to the updates, which share them with the emulated
# device.
LINK_BYTES_PER_S = 1e9
_GPU_PARAMS_PER_S = 4e8
_CALIBRATE_S = 15.0
# Of the measurement of a step's overhead: parameters of a subgroup, steps, and those
# before rates are as later.
_SMALL_PARAMS = 1024
_STEPS, _WARMUP_STEPS, _BETWEEN_STEPS_S = 16, 6, 0.03
_REQUIRED_RATES = (
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
class Testbed:
    """The device and machine of all runs of a comparison."""

    device: torch.device
    name: str
    machine: Machine
    memory_budget: float
    # Rate of an emulated link per direction; None for a GPU.
    link_bytes_per_s: float | None
    threads: int | None  # CPU threads of updates; None for the default of the kernel.
    # Folders for state that host memory does not hold: paths of the machine's storage;
    # empty: none.
    storage: tuple[Path, ...] = ()

    @property
    def emulated(self) -> bool:
        return self.link_bytes_per_s is not None

    def make_device(self) -> EmulatedDevice | None:
        """Make an emulated device for one run.

        Return None on a GPU, which the optimizer finds by itself.
        """
        if self.link_bytes_per_s is None:
            return None
        return EmulatedDevice(
            self.memory_budget,
            self.link_bytes_per_s,
            self.link_bytes_per_s,
            _GPU_PARAMS_PER_S,
        )


def find_testbed(
    params: int,
    subgroup_params: int,
    memory_budget: float,
    link_bytes_per_s: float | None,
    machine: Machine | None,
) -> Testbed:
    """Return the GPU of this machine, or an emulated device.

    The emulated device has its own link and GPU; it is used without a GPU or if a link
    rate is given. A `machine` has the rates to predict with, else they are measured.
    Raises MachineError for a missing rate.
    """
    if torch.cuda.is_available() and link_bytes_per_s is None:
        rates = machine or seams.service("calibrate")(_CALIBRATE_S, "this machine")
        testbed = Testbed(
            torch.device("cuda"),
            torch.cuda.get_device_name(),
            rates,
            memory_budget,
            None,
            None,
        )
    else:
        link = link_bytes_per_s or LINK_BYTES_PER_S
        # One core is left to the emulated device.
        threads = max(1, host_limits.cores() - 1)
        rates = machine or seams.service("measure-cpu")(params, threads)
        rates = replace(
            rates,
            name=f"{rates.name} with an emulated device",
            gpu_memory_bytes=memory_budget,
            h2d_bytes_per_s=link,
            d2h_bytes_per_s=link,
            h2d_pageable_bytes_per_s=link,
            d2h_pageable_bytes_per_s=link,
            duplex_bytes_per_s=None,
            gpu_update_params_per_s=_GPU_PARAMS_PER_S,
        )
        testbed = Testbed(
            torch.device("cpu"), "emulated device", rates, memory_budget, link, threads
        )
        if machine is None:
            overhead_s = _measure_overhead(testbed, -(-params // subgroup_params))
            testbed = replace(
                testbed, machine=replace(rates, step_overhead_s=overhead_s)
            )
    testbed.machine.need(_REQUIRED_RATES, "compare")
    return testbed


def _measure_overhead(testbed: Testbed, subgroups: int) -> float:
    """Return the median time of a step whose subgroups are so small that their rates do
    not count."""
    param = torch.nn.Parameter(torch.zeros(subgroups * _SMALL_PARAMS))
    optimizer = InterleavedAdamW(
        [param],
        policy="pipelined",
        machine=testbed.machine,
        subgroup_params=_SMALL_PARAMS,
        memory_budget=testbed.memory_budget,
        max_grad_norm=1.0,
        device=testbed.make_device(),
        threads=testbed.threads,
    )
    times = []
    with closing(optimizer):
        for _ in range(_STEPS):
            param.grad = torch.ones_like(param)
            # As long as forward and backward would take: threads that wait for work are
            # asleep by then.
            time.sleep(_BETWEEN_STEPS_S)
            begin = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[_WARMUP_STEPS:])
