"""Measures the rates of the CPU alone, over the memory of a job."""

import torch

from ebbtide import host_limits
from ebbtide.features.calibrate import cpu
from ebbtide.features.calibrate.cpu import KERNEL_BYTES, OnePassAdamW
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import MeasurementRecord, Setup, measure_time
from ebbtide.interleave.engine.numerics.kernels import ONE_PASS_BYTES
from ebbtide.machines.machine import Machine, machine_from

_WINDOW_S = 0.25


def measure_cpu(params: int, threads: int) -> Machine:
    """Measure the rates of the CPU over as much memory as the job's state takes.

    Caches then hold as much as in the job.
    """
    cores = host_limits.cores()
    record = MeasurementRecord()
    setup = Setup(Ranks(), cores, cores, KERNEL_BYTES * params, _WINDOW_S, None)
    before = torch.get_num_threads()
    try:
        cpu.measure_bandwidth(setup, record)
        cpu.measure_cast(setup, record)
        cpu.measure_norm(setup, record)
    finally:
        torch.set_num_threads(before)
    timing = measure_time(OnePassAdamW(params, threads), _WINDOW_S, setup.ranks)
    rate = params / timing.seconds
    how = f"one pass by numba (threads: {threads})"
    record.rate("cpu_update_params_per_s", rate, how, timing)
    record.host_traffic(ONE_PASS_BYTES * rate, how, timing)
    return machine_from({**record.rates, "measured": record.measured}, "this machine")
