"""One calibration, from its first measurement to the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide import host_limits
from ebbtide.errors import MachineError
from ebbtide.interleave.calibrate import counters, cpu, gpu, host_memory, link
from ebbtide.interleave.calibrate.ranks import Ranks
from ebbtide.interleave.calibrate.record import Record, Setup
from ebbtide.machines.machine import Machine

# Runs that spread by more than this were disturbed.
_UNSTEADY = 0.5

Began = Callable[[str, float], object]


@dataclass(frozen=True)
class Part:
    """windows: how many things it measures, each for as long."""

    label: str
    run: Callable[[Setup, Record], None]
    windows: int


_ON_HOST = (
    Part("host memory", host_memory.bandwidth, 2),
    Part("update on the CPU", cpu.update, 2),
    Part("cast on the CPU", cpu.cast, 1),
)
_WITHOUT_GPU = (*_ON_HOST, Part("update beside copies", cpu.contention, 3))
_WITH_GPU = (
    *_ON_HOST,
    Part("GPU memory", gpu.memory, 0),
    Part("pinned copies", link.pinned, 3),
    Part("pageable copies", link.pageable, 2),
    Part("update on the GPU", gpu.update, 1),
    Part("overhead of a step", gpu.overhead, 1),
    Part("update beside copies", link.contention, 3),
    Part("the card's counters", counters.counters, 6),
)


def calibrate(ranks: Ranks, seconds: float, name: str, began: Began = lambda *_: None) -> Machine:
    """Measure in about so many seconds what a machine can do while all ranks measure; every rank must call this. The
    slowest sets the pace. began: is told of each part as it begins, and the share of the whole that is done. Raises
    MachineError where a rank failed or memory does not suffice."""
    record = _measure(ranks, seconds, began)
    each = ranks.gather(record.rates)
    more: dict[str, Any] = {"measured": record.measured, **record.more}
    rates = dict(record.rates)
    if ranks.count > 1:
        rates = {key: _slowest(key, [found[key] for found in each if key in found]) for key in record.rates}
        more["ranks"] = {"count": ranks.count, "each": {key: [found.get(key) for found in each] for key in rates}}
    shared = more.get("contention")
    if shared is not None:
        # What the simulator would say: together they get what there is, each slowed by the same factor.
        shared["fluid_share"] = min(1.0, rates["host_memory_bytes_per_s"] / shared.pop("asked_host_bytes_per_s"))
    return Machine(name=name, **rates, more={**more, "notes": record.notes})


def _measure(ranks: Ranks, seconds: float, began: Began) -> Record:
    record = Record()
    device = ranks.local_rank % torch.cuda.device_count() if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    parts = _WITH_GPU if device is not None else _WITHOUT_GPU
    windows = sum(part.windows for part in parts)
    setup = _setup(ranks, seconds / windows, device, record)
    done = 0
    for part in parts:
        began(part.label, done / windows)
        try:
            part.run(setup, record)
        except torch.OutOfMemoryError:
            raise MachineError(f"the GPU has no room to measure {part.label}: end what else runs on it") from None
        done += part.windows
    unsteady = [key for key, about in record.measured.items() if about.get("spread", 0.0) > _UNSTEADY]
    if unsteady:
        record.notes.append(f"not steady: {', '.join(unsteady)}; measure again when nothing else runs here")
    if device is None:
        record.notes.append(
            "there is no GPU here: its rates and the link's are null; fit them with --from-trace, or write them in"
        )
    return record


def _slowest(key: str, values: list[float]) -> float:
    return max(values) if key == "step_overhead_s" else min(values)


def _setup(ranks: Ranks, window_s: float, device: int | None, record: Record) -> Setup:
    cores = max(1, host_limits.cores() // ranks.local_count)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) > 0 else cores
    if threads != cores:
        record.notes.append(
            f"OMP_NUM_THREADS={asked}: the CPU's rates are of {threads} threads, and a rank has {cores} cores: set "
            "it to what the job has (torchrun sets 1 where it is not set)"
        )
    if device is not None and ranks.count < torch.cuda.device_count():
        record.notes.append(
            f"measured by {ranks.count} ranks, and this host has {torch.cuda.device_count()} GPUs: where a job's ranks "
            f"share its memory, measure with --ranks {torch.cuda.device_count()}"
        )
    memory = host_limits.memory_bytes()
    share = memory // ranks.local_count if memory is not None else None
    if share is not None:
        split = f", divided by {ranks.local_count} ranks" if ranks.local_count > 1 else ""
        record.rate("host_memory_bytes", float(share), f"of the host, or what its control groups allow{split}")
    cache = host_limits.cache_bytes()
    size = host_memory.working_set(share, cache)
    if cache is not None and size < 4 * cache:
        record.notes.append(
            f"memory is scarce beside the caches ({cache >> 20} MiB): the CPU's rates may be of caches in part"
        )
    record.more["working_set_bytes"] = size
    return Setup(ranks, threads, cores, size, window_s, device)
