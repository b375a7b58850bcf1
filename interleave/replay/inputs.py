"""Resolves the inputs of a replay or a plan: the workload, the machines and their
prices, the recorded GPU, and policies of the user."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from ebbtide import seams
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.errors import MachineError, PlanError, PolicyError, WorkloadError
from ebbtide.interleave.model.workload import (
    FreeMemorySteps,
    Workload,
    load_workload,
    workload_from,
)
from ebbtide.interleave.policies import Policy, as_policies
from ebbtide.machines.catalog import MachineArgument, find_machine, preset, presets
from ebbtide.machines.data_sheets import whole_memory_bytes, with_host
from ebbtide.machines.kernels.rates import DEFAULT_GPU, GpuRates
from ebbtide.machines.machine import GpuCompute, Machine, machine_from
from ebbtide.profiler.trace import Trace
from ebbtide.units import ByteCount, byte_count, bytes_text, counted

# Devices whose memory differs by less than this share count as the same.
_SAME_CAPACITY = 0.05
NETWORK_NOTE = (
    "the network between hosts is not known: ranks exchange as fast as within a host"
)


@dataclass(frozen=True)
class JobSize:
    """A job of which only the parameters of the whole model are known; ranks share
    their state."""

    params: int
    ranks: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0


def resolve_workload(
    trace: Trace | None,
    file: Path | None,
    size: JobSize | None = None,
    free_bytes: ByteCount | None = None,
    host_free_bytes: ByteCount | None = None,
    policies: Sequence[Policy | str] = (),
) -> Workload:
    """Return the workload of a trace, a workload file or a size.

    Exactly one of them is given. The workload of a trace has its layers where one of
    the policies moves them. Stated free memory of device and host replaces the
    source's.
    """
    if sum(source is not None for source in (trace, file, size)) != 1:
        raise WorkloadError(
            "name a trace, a --workload file, or a size (--params): one of the three"
        )
    if file is not None:
        workload = load_workload(file)
    elif size is not None:
        workload = workload_of_size(size)
    else:
        from ebbtide.interleave.replay.workload_from_trace import workload_of

        assert trace is not None
        workload = workload_of(trace)
        if any(policy.uses("layers") for policy in as_policies(policies)):
            workload = seams.service("trace-layers")(workload, trace)
    if free_bytes is not None:
        workload = replace(
            workload,
            gpu_free=with_min_free(
                workload.gpu_free, float(byte_count(free_bytes, "free_bytes"))
            ),
        )
    if host_free_bytes is not None:
        workload = replace(
            workload,
            host_free_bytes=float(byte_count(host_free_bytes, "host_free_bytes")),
        )
    return workload


def with_min_free(free: FreeMemorySteps | None, min_bytes: float) -> FreeMemorySteps:
    """Return a step function of free memory whose lowest value is `min_bytes`.

    The highest, which the job never uses, stays, and the memory in use beyond is
    scaled. One that is None, or never higher, becomes constant.
    """
    sizes = [size for _, size in free or ()]
    low, high = min(sizes, default=min_bytes), max(sizes, default=min_bytes)
    if free is None or min_bytes >= high or low == high:
        return ((0.0, min_bytes),)
    factor = (high - min_bytes) / (high - low)
    # The lowest value is exact, regardless of rounding.
    return tuple(
        (
            start_s,
            max(min_bytes, high - (high - size) * factor) if size > low else min_bytes,
        )
        for start_s, size in free
    )


def workload_of_size(size: JobSize) -> Workload:
    """Return a workload in bf16 with Adam, in subgroups of 1e8 parameters."""
    if size.params < 1 or size.ranks < 1:
        raise WorkloadError("--params and --ranks must be at least 1")
    values = {
        "name": (
            f"{size.params / 1e9:.3g} G parameters on {counted(size.ranks, 'rank')}"
        ),
        "params": -(-size.params // size.ranks),
        "subgroup_params": 1e8,
        "forward_s": size.forward_s,
        "backward_s": size.backward_s,
    }
    workload = workload_from(values, "the size")
    if size.forward_s or size.backward_s:
        return workload
    return replace(
        workload,
        notes=("forward and backward are not known: only the update is replayed",),
    )


def resolve_machine(machine: MachineArgument | None, trace: Trace | None) -> Machine:
    """Return a machine, by name or file, or the one recorded in the trace."""
    if trace is None:
        return find_machine(machine)
    return find_machine(machine, trace.meta.machine, recorded_in=str(trace.path))


def own_preset(trace: Trace | None) -> str | None:
    """Return the preset with the card of a trace, fitted ones first.

    Return None for an own machine, or a card not known.
    """
    if trace is None or trace.meta.machine is not None:
        return None
    machine = own_machine(trace)
    return machine.name if machine is not None else None


def own_preset_text(name: str, trace: Trace) -> str:
    """Return the line that says which preset was taken for a trace."""
    card = trace.rank(trace.ranks[0]).main_device.name
    return f"machine {name} for the trace's {card} (ebbtide machines)"


def share_box(
    machine: Machine, ranks_per_host: int | None, trace: Trace | None
) -> Machine:
    """Return the machine with the rates of one of several ranks on a host.

    By default there are as many ranks as the trace had, on another machine no more than
    it has GPUs. The rates are the same without a `box`, and for a simulated trace (of
    one rank).
    """
    if ranks_per_host is not None:
        return machine.for_ranks(ranks_per_host)
    if trace is None or machine.box is None or trace.meta.source == "simulated":
        return machine
    recorded = ranks_on_host(trace)
    if recorded is not None and _other_machine(machine, trace)[0] is not None:
        recorded = min(recorded, machine.box.ranks)
    return machine if recorded is None else machine.for_ranks(recorded)


def ranks_on_host(trace: Trace) -> int | None:
    """Return how many ranks of a trace shared the host of its first rank.

    Return None if the trace does not have them all.
    """
    ranks = trace.ranks
    entries = [trace.rank(rank) for rank in ranks]
    if not entries:
        return None
    host = entries[0].host
    if host is None and max(entries[0].world_size or 0, max(ranks) + 1) > len(ranks):
        # An imported trace of some ranks: the others may have run on the same host.
        return None
    return sum(entry.host == host for entry in entries)


def note_other_machine(
    workload: Workload,
    machine: Machine,
    trace: Trace | None,
    free_is_stated: bool = False,
) -> Workload:
    """Return the workload of a trace on a machine, with a note if that is not the
    machine of the trace.

    Times stay as recorded; on a GPU with less memory, that much less is free, unless
    the free memory is stated."""
    if trace is None:
        return workload
    other, lacking = _other_machine(machine, trace)
    if other is None:
        return workload
    notes, free = [*workload.notes], workload.gpu_free
    if lacking <= 0 or free is None or free_is_stated:
        notes.append(
            f"the trace was recorded on {other}: forward, backward and free memory are "
            "replayed as recorded"
        )
    else:
        notes.append(
            f"the trace was recorded on {other}: so much less is free; times are "
            "replayed as recorded"
        )
        workload = replace(
            workload,
            gpu_free=tuple((at_s, max(0.0, size - lacking)) for at_s, size in free),
            missing_bytes=max(
                workload.missing_bytes, lacking - min(size for _, size in free)
            ),
        )
    if machine.box is not None and (ranks_on_host(trace) or 0) > machine.box.ranks:
        notes.append(NETWORK_NOTE)
    return replace(workload, notes=tuple(notes))


def _other_machine(machine: Machine, trace: Trace) -> tuple[str | None, float]:
    """Return the machine of a trace in words if it is known to be another one.

    Return also the bytes that its GPU has more.
    """
    capacity = machine.gpu_memory_bytes
    if trace.meta.machine is not None:
        name, recorded = (
            trace.meta.machine.get("name"),
            trace.meta.machine.get("gpu_memory_bytes"),
        )
        return (f"the machine {name}" if name != machine.name else None), (
            recorded or 0.0
        ) - (capacity or inf)
    device = trace.meta.ranks[0].main_device if trace.meta.ranks else None
    if device is not None and device.kind == "cpu":
        return ("a CPU" if capacity else None), 0.0
    recorded = device.capacity_bytes if device is not None else None
    if not recorded or not capacity:
        return None, 0.0
    if _is_same_capacity(recorded, capacity):
        own = recorded_gpu(trace)
        return (None if _has_rates_of(machine, own.compute) else own.name), 0.0
    return (
        f"a GPU of {bytes_text(recorded)}, not {bytes_text(capacity)}",
        recorded - capacity,
    )


def with_recorded_memory(machine: Machine, recorded_bytes: float | None) -> Machine:
    """Return a machine with the memory recorded of a GPU that counts as the same.

    Drivers and torch count the memory of one GPU differently. None: not recorded.
    """
    capacity = machine.gpu_memory_bytes
    if (
        not recorded_bytes
        or not capacity
        or not _is_same_capacity(recorded_bytes, capacity)
    ):
        return machine
    return replace(machine, gpu_memory_bytes=recorded_bytes)


def _has_rates_of(machine: Machine, gpu: GpuCompute | None) -> bool:
    """Return whether a GPU computes as fast as the machine's.

    Return True also where one of them is not known.
    """
    here = machine.gpu
    if here is None or gpu is None:
        return True
    return (here.flops_per_s, here.memory_bytes_per_s) == (
        gpu.flops_per_s,
        gpu.memory_bytes_per_s,
    )


def _is_same_capacity(recorded: float, capacity: float) -> bool:
    return abs(recorded / capacity - 1) <= _SAME_CAPACITY


@contextmanager
def own_policies(path: Path | None) -> Iterator[None]:
    """Run a Python file of the user that registers policies.

    Name it where their plans are invalid.
    """
    if path is not None:
        _load_policies(path)
    try:
        yield
    except PlanError as error:
        if path is None:
            raise
        raise PolicyError(f"{path}: {error}") from error


def _load_policies(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"ebbtide_policies_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise PolicyError(f"{path} is not a Python file that registers policies")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise PolicyError(f"{path} cannot be run: {error!r}") from error


@dataclass(frozen=True)
class PlanTarget:
    """A machine to plan for."""

    machine: Machine
    # Its preset or file; None: the trace's machine, or its GPU in another host.
    source: str | None
    price_per_hour: float | None


def find_targets(
    names: Sequence[str], host: str | None, prices: Sequence[float], trace: Trace | None
) -> list[PlanTarget]:
    """Return the machines to plan for: presets or files, else the machine of the trace,
    else all presets.

    `host`: another one for their GPUs; `prices` of a host per hour: none, one for all
    machines, or one for each."""
    recorded = trace.meta.machine if trace is not None and not names else None
    sources: list[str | None] = (
        [None] if recorded is not None else [*(names or presets())]
    )
    if len(prices) not in (0, 1, len(sources)):
        raise MachineError(
            f"there are {len(prices)} prices for {len(sources)} machines: write one "
            "for all, or one for each"
        )
    each: list[float | None] = [*prices] * (
        len(sources) if len(prices) == 1 else 1
    ) or [None] * len(sources)
    targets = []
    for source, price in zip(sources, each, strict=True):
        machine = find_machine(
            source, recorded, str(trace.path) if trace is not None else "the trace"
        )
        if host is None:
            targets.append(PlanTarget(machine, source, price))
        else:
            targets.append(PlanTarget(with_host(machine, host), None, price))
    return targets


# GPUs of the same model whose memory differs by less than this share count as the same.
_SAME_GPU_CAPACITY = 0.08
_MAKERS = frozenset({"nvidia", "amd", "instinct", "geforce", "tesla"})


class RecordedGpu(NamedTuple):
    """A GPU: its name for people, and its rates (None: not known)."""

    name: str
    compute: GpuCompute | None


def recorded_gpu(trace: Trace) -> RecordedGpu:
    """Return the GPU of a trace: its machine's, else the preset's with the same model
    and memory; for a dry run without a machine the GPU that its times are of."""
    machine = _recorded_machine(trace)
    if machine is not None and machine.gpu is not None:
        return RecordedGpu(machine.name, machine.gpu)
    if machine is None and is_predicted(trace):
        return RecordedGpu(DEFAULT_GPU, GpuRates().gpu)
    name = trace.rank(trace.ranks[0]).main_device.name or "an unknown GPU"
    return RecordedGpu(
        name, next((machine.gpu for machine in _presets_of_gpu(trace)), None)
    )


def own_machine(trace: Trace) -> Machine | None:
    """Return the machine of a trace, else the preset of its GPU.

    A fitted preset comes before data sheets; None: not known.
    """
    machines = sorted(
        _presets_of_gpu(trace), key=lambda machine: "fit" not in machine.extra
    )
    return _recorded_machine(trace) or next(iter(machines), None)


def _recorded_machine(trace: Trace) -> Machine | None:
    recorded = trace.meta.machine
    return (
        machine_from(recorded, f"the machine of {trace.path}")
        if recorded is not None
        else None
    )


def _presets_of_gpu(trace: Trace) -> Iterator[Machine]:
    """Yield the presets with the same model of a GPU, and the same memory."""
    device = trace.rank(trace.ranks[0]).main_device
    words = _words(device.name or "")
    for machine in map(preset, presets()):
        capacity = whole_memory_bytes(machine)
        if (
            machine.gpu is None
            or not capacity
            or not device.capacity_bytes
            or not machine.gpu.name
        ):
            continue
        same_memory = abs(device.capacity_bytes / capacity - 1) <= _SAME_GPU_CAPACITY
        if same_memory and words & _words(machine.gpu.name) - _MAKERS:
            yield machine


def _words(name: str) -> set[str]:
    """Return the words of a name that tell the model, as `h100` and `4090`."""
    return {
        word
        for word in re.findall(r"[a-z]*\d+[a-z]*", name.lower())
        if not word.endswith("gb")
    }
