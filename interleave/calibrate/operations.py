"""Measures the time of an operation of the executor that does not depend on its size."""

from __future__ import annotations

import contextlib

import torch

from ebbtide.errors import UserError
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.interleave.calibrate.timing import Timing, measure_time
from ebbtide.interleave.engine.optimizer import InterleavedAdamW
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine

# Every kind of operation occurs in its plans.
_POLICY = "interleaved:2"
# So many that the ends of the plan hardly matter, and so small that bytes and arithmetic do not.
_SUBGROUPS = 64
_SUBGROUP_PARAMS = 1024
# A machine on which operations take one second each, whatever their size.
_UNLIMITED = 1e30
_ONE_SECOND_EACH = Machine(
    h2d_bytes_per_s=_UNLIMITED,
    d2h_bytes_per_s=_UNLIMITED,
    host_memory_bytes_per_s=_UNLIMITED,
    cpu_update_params_per_s=_UNLIMITED,
    gpu_update_params_per_s=_UNLIMITED,
    operation_s=1.0,
)


def measure_operation(setup: Setup, record: Record) -> None:
    """Measure `operation_s`: the value with which the simulator predicts the time of a plan of tiny subgroups.

    `InterleavedAdamW` runs the plan: on the GPU, else on the emulated device.
    """
    device = torch.device("cpu") if setup.device is None else torch.device("cuda", setup.device)
    params = [
        torch.nn.Parameter(torch.zeros(_SUBGROUP_PARAMS, dtype=torch.bfloat16, device=device))
        for _ in range(_SUBGROUPS)
    ]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    times_s: list[float] = []

    def step() -> None:
        optimizer.step()
        assert optimizer.last_schedule is not None
        times_s.append(operation_s(optimizer.last_schedule))

    try:
        with contextlib.closing(
            InterleavedAdamW(params, policy=_POLICY, subgroup_params=_SUBGROUP_PARAMS, threads=setup.threads)
        ) as optimizer:
            measure_time(step, setup.window_s, setup.ranks)
    except UserError as error:
        record.notes.append(f"operation_s was not measured: {error}")
        return
    # The first step also compiles kernels and allocates memory.
    timing = Timing.from_runs(times_s[1:])
    where = "the GPU" if setup.device is not None else "the emulated device, since there is no GPU"
    how = f"{_POLICY} with {_SUBGROUPS} subgroups of {_SUBGROUP_PARAMS:,} parameters on {where}"
    record.rate("operation_s", timing.seconds, how, timing)


def operation_s(schedule: Schedule) -> float:
    """Return the seconds per operation with which the simulator takes as long as a measured schedule.

    Args:
        schedule: A schedule whose operations are too small for their sizes to matter.
    """
    unit = simulate(schedule.plan, schedule.workload, _ONE_SECOND_EACH)
    return _span_s(schedule) / _span_s(unit)


def _span_s(schedule: Schedule) -> float:
    """Return the time from the start of the first operation to the end of the last one."""
    return max(schedule.ends) - min(schedule.starts)
