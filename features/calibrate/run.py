"""Runs a calibration, from the first measurement to the machine."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ebbtide import host_limits
from ebbtide.errors import MachineError, UserError
from ebbtide.features.calibrate import cpu, gpu, link
from ebbtide.features.calibrate import storage as storage_rates
from ebbtide.features.calibrate.ranks import Ranks
from ebbtide.features.calibrate.record import (
    MeasurementRecord,
    Setup,
    Timing,
    measure_time,
)
from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import SHARED_RATES, Box, Machine, StoragePath

# Every kind of operation occurs in its plans.
_POLICY = "interleaved:2"
# So many that the ends of the plan hardly matter, and so small that bytes and
# arithmetic do not.
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


def measure_operation(setup: Setup, record: MeasurementRecord) -> None:
    """Measure `operation_s`.

    The simulator uses it to predict InterleavedAdamW's time for a plan of tiny
    subgroups.
    """
    device = (
        torch.device("cpu")
        if setup.device is None
        else torch.device("cuda", setup.device)
    )
    params = [
        torch.nn.Parameter(
            torch.zeros(_SUBGROUP_PARAMS, dtype=torch.bfloat16, device=device)
        )
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
            InterleavedAdamW(
                params,
                policy=_POLICY,
                subgroup_params=_SUBGROUP_PARAMS,
                threads=setup.threads,
            )
        ) as optimizer:
            measure_time(step, setup.window_s, setup.ranks)
    except UserError as error:
        record.notes.append(f"operation_s was not measured: {error}")
        return
    # The first step also compiles kernels and allocates memory.
    timing = Timing.from_runs(times_s[1:])
    where = (
        "the GPU"
        if setup.device is not None
        else "the emulated device, since there is no GPU"
    )
    how = (
        f"{_POLICY} with {_SUBGROUPS} subgroups of {_SUBGROUP_PARAMS:,} parameters on "
        f"{where}"
    )
    record.rate("operation_s", timing.seconds, how, timing)


def operation_s(schedule: Schedule) -> float:
    """Return the seconds per operation of a measured schedule of tiny operations, by
    the simulator's time for it."""
    unit = simulate(schedule.plan, schedule.workload, _ONE_SECOND_EACH)
    return _span_s(schedule) / _span_s(unit)


def _span_s(schedule: Schedule) -> float:
    """Return the time from the start of the first operation to the last one's end."""
    return max(schedule.ends) - min(schedule.starts)


# Runs that spread by more than this share of the median were disturbed.
_UNSTEADY_SPREAD = 0.5

# Called with the label of a part as it begins, and the share of the calibration that is
# done.
PartProgress = Callable[[str, float], object]


@dataclass(frozen=True)
class Part:
    """One part of a calibration."""

    label: str
    run: Callable[[Setup, MeasurementRecord], None]
    windows: int


_HOST_PARTS = (
    Part("host memory", cpu.measure_bandwidth, 2),
    Part("update on the CPU", cpu.measure_update, 2),
    Part("update out of place on the CPU", cpu.measure_out_of_place, 2),
    Part("update of remainders on the CPU", cpu.measure_remainder, 2),
    Part("cast on the CPU", cpu.measure_cast, 1),
    Part("norm on the CPU", cpu.measure_norm, 1),
    Part("operations of a plan", measure_operation, 1),
)
# Measured times: the slowest rank has the largest.
_TIMES = ("step_overhead_s", "operation_s")
_ALONE_PARTS = _HOST_PARTS[:2]
_COPIES = (
    Part("pinned copies", link.measure_pinned_copies, 3),
    Part("pageable copies", link.measure_pageable_copies, 2),
)
_PARTS_WITHOUT_GPU = (
    *_HOST_PARTS,
    Part("update during copies", cpu.measure_traffic, 1),
)
_PARTS_WITH_GPU = (
    *_HOST_PARTS,
    Part("GPU memory", gpu.record_memory, 0),
    *_COPIES,
    Part("update on the GPU", gpu.measure_update, 1),
    Part("cast on the GPU", gpu.measure_cast, 1),
    Part("arithmetic of the GPU", gpu.measure_compute, 5),
    Part("overhead of a step", gpu.measure_overhead, 1),
    Part("update during copies", link.measure_traffic, 1),
)


def calibrate(
    ranks: Ranks,
    seconds: float,
    name: str,
    progress: PartProgress = lambda *_: None,
    storage: Sequence[Path] = (),
) -> Machine:
    """Measure the rates of this machine while all ranks measure.

    Every rank must call this.

    The rate of the slowest rank counts. `storage` are folders for state that host
    memory does not hold."""
    record = _measure(ranks, seconds, progress, storage)
    rates_by_rank = ranks.gather(record.rates)
    extra: dict[str, Any] = {"measured": record.measured, **record.extra}
    rates = dict(record.rates)
    if ranks.count > 1:
        rates = {
            key: _slowest(key, [each[key] for each in rates_by_rank if key in each])
            for key in record.rates
        }
        each_rank = {key: [each.get(key) for each in rates_by_rank] for key in rates}
        extra["ranks"] = {"count": ranks.count, "each": each_rank}
    box = _box(ranks, rates_by_rank, record.alone) if ranks.local_count > 1 else None
    machine = Machine(
        name=name,
        box=box,
        gpu=record.gpu,
        storage=_slowest_paths(ranks, record.storage),
        extra={**extra, "notes": record.notes},
    )
    return replace(machine, **rates)  # type: ignore[arg-type]  # keys of rates, which are floats


def measure_quickly(seconds: float) -> dict[str, float]:
    """Measure host memory, updates on the CPU and copies of this process alone.

    Return rates as machines name them.
    """
    record = MeasurementRecord()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    parts = _ALONE_PARTS if device is None else (*_ALONE_PARTS, *_COPIES)
    setup = _setup(
        Ranks(), seconds / sum(part.windows for part in parts), device, record
    )
    for part in parts:
        part.run(setup, record)
    return record.rates


def _box(
    ranks: Ranks, rates_by_rank: list[dict[str, float]], alone: dict[str, float]
) -> Box:
    """Return the totals of the ranks on a host.

    With several hosts, these are the totals of an average one.
    """
    totals = {
        key: sum(rates[key] for rates in rates_by_rank)
        * ranks.local_count
        / ranks.count
        for key in SHARED_RATES
    }
    one_rank = {f"one_rank_{key}": alone[key] for key in SHARED_RATES if key in alone}
    return Box(ranks.local_count, **totals, **one_rank)


def _measure_alone(setup: Setup, record: MeasurementRecord) -> None:
    """Measure the first rank of a host while the others wait.

    Host memory and updates on the CPU are measured.
    """
    setup.ranks.wait()
    if setup.ranks.local_rank == 0:
        alone = MeasurementRecord()
        for part in _ALONE_PARTS:
            part.run(replace(setup, ranks=Ranks()), alone)
        record.alone.update(alone.rates)
    setup.ranks.wait()


def _measure(
    ranks: Ranks, seconds: float, progress: PartProgress, storage: Sequence[Path]
) -> MeasurementRecord:
    record = MeasurementRecord()
    device = (
        ranks.local_rank % torch.cuda.device_count()
        if torch.cuda.is_available()
        else None
    )
    if device is not None:
        torch.cuda.set_device(device)
    parts = _PARTS_WITH_GPU if device is not None else _PARTS_WITHOUT_GPU
    if ranks.local_count > 1:
        parts = (
            *parts,
            Part(
                "one rank alone",
                _measure_alone,
                sum(part.windows for part in _ALONE_PARTS),
            ),
        )
    for folder in storage:
        measure = partial(storage_rates.measure_storage, folder)
        parts = (*parts, Part(f"storage {folder}", measure, storage_rates.WINDOWS))
    windows = sum(part.windows for part in parts)
    setup = _setup(ranks, seconds / windows, device, record)
    done = 0
    for part in parts:
        progress(part.label, done / windows)
        try:
            part.run(setup, record)
        except torch.OutOfMemoryError:
            raise MachineError(
                f"too little free GPU memory to measure {part.label}: end other "
                "processes that use the GPU"
            ) from None
        done += part.windows
    unsteady = [
        key
        for key, entry in record.measured.items()
        if entry.get("spread", 0.0) > _UNSTEADY_SPREAD
    ]
    if unsteady:
        record.notes.append(
            f"unsteady rates: {', '.join(unsteady)}; measure again when nothing else "
            "runs on this host"
        )
    if device is None:
        record.notes.append(
            "there is no GPU here: rates of the GPU and of the link are null; fit them "
            "with --from-trace, or edit "
            "the file"
        )
    return record


def _slowest_paths(ranks: Ranks, paths: list[StoragePath]) -> tuple[StoragePath, ...]:
    """Return the paths with the rates of the slowest rank."""
    slowest = []
    for path in paths:
        read, write = path.read_bytes_per_s, path.write_bytes_per_s
        each = ranks.gather(
            {
                "read": read,
                "write": write,
                "both": path.duplex_bytes_per_s or read + write,
            }
        )
        read, write, both = (
            min(rates[key] for rates in each) for key in ("read", "write", "both")
        )
        slowest.append(
            replace(
                path,
                read_bytes_per_s=read,
                write_bytes_per_s=write,
                duplex_bytes_per_s=both,
            )
        )
    return tuple(slowest)


def _slowest(key: str, values: list[float]) -> float:
    return max(values) if key in _TIMES else min(values)


def _setup(
    ranks: Ranks, window_s: float, device: int | None, record: MeasurementRecord
) -> Setup:
    cores = host_limits.rank_cores(ranks.local_count)
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    threads = (
        int(omp_threads) if omp_threads.isdigit() and int(omp_threads) > 0 else cores
    )
    if threads != cores:
        record.notes.append(
            f"OMP_NUM_THREADS={omp_threads}: CPU rates are of {threads} threads, but a "
            f"rank has {cores} cores; set it "
            "to the value of the job (torchrun sets 1 by default)"
        )
    if device is not None and ranks.count < torch.cuda.device_count():
        record.notes.append(
            f"measured with {ranks.count} of {torch.cuda.device_count()} GPUs of this "
            "host: if the ranks of a job "
            f"share the host, measure with --ranks {torch.cuda.device_count()}"
        )
    memory = host_limits.memory_bytes()
    share = memory // ranks.local_count if memory is not None else None
    if share is not None:
        split = (
            f", divided by {ranks.local_count} ranks" if ranks.local_count > 1 else ""
        )
        record.rate(
            "host_memory_bytes",
            float(share),
            f"memory of the host, or limit of its control groups{split}",
        )
    cache = host_limits.cache_bytes()
    size = cpu.working_set(share, cache)
    if cache is not None and size < 4 * cache:
        record.notes.append(
            f"little memory compared with the CPU caches ({cache >> 20} MiB): CPU "
            "rates may be partly those of caches"
        )
    record.extra["working_set_bytes"] = size
    return Setup(ranks, threads, cores, size, window_s, device)


def calibrate_alone(seconds: float, name: str) -> Machine:
    """Measure the rates of this machine with one rank."""
    return calibrate(Ranks(), seconds, name)
