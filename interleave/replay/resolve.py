"""Resolves what a replay runs on: its workload, its machine, and policies in a file of the user."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.errors import PolicyError, WorkloadError
from ebbtide.interleave.model.workload import Workload, load_workload, workload_from
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.units import bytes_text

if TYPE_CHECKING:
    from ebbtide.profiler.trace import Trace

# Devices whose memory differs by less than this share count as the same.
_SAME_CAPACITY = 0.05


@dataclass(frozen=True)
class JobSize:
    """A job of which only the size is known.

    Attributes:
        params: Parameters of the whole model.
        ranks: Ranks that share the optimizer state.
        forward_s: Length of the forward, seconds.
        backward_s: Length of the backward, seconds.
    """

    params: int
    ranks: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0


def resolve_workload(
    trace: Trace | None,
    file: Path | None,
    size: JobSize | None = None,
    free_bytes: int | None = None,
    host_free_bytes: int | None = None,
) -> Workload:
    """Return the workload of a trace, a workload file or a size.

    Args:
        trace: An opened trace.
        file: A workload file.
        size: A size.
        free_bytes: Free device memory at all times, instead of what the source has.
        host_free_bytes: Host memory that the optimizer may use, likewise.

    Raises:
        WorkloadError: There is not exactly one source, or it has no workload.
    """
    workload = _workload(trace, file, size)
    if free_bytes is not None:
        workload = replace(workload, gpu_free=((0.0, float(free_bytes)),))
    return workload if host_free_bytes is None else replace(workload, host_free_bytes=float(host_free_bytes))


def _workload(trace: Trace | None, file: Path | None, size: JobSize | None) -> Workload:
    if sum(source is not None for source in (trace, file, size)) != 1:
        raise WorkloadError("name a trace, a --workload file, or a size (--params): one of the three")
    if file is not None:
        return load_workload(file)
    if size is not None:
        return workload_of_size(size)
    from ebbtide.interleave.replay.workload_from_trace import workload_of

    assert trace is not None
    return workload_of(trace)


def workload_of_size(size: JobSize) -> Workload:
    """Return a workload in bf16 with Adam, in subgroups of 1e8 parameters.

    Raises:
        WorkloadError: There are no parameters or no ranks.
    """
    if size.params < 1 or size.ranks < 1:
        raise WorkloadError("--params and --ranks must be at least 1")
    values = {
        "name": f"{size.params / 1e9:.3g} G parameters on {size.ranks} rank{'s' if size.ranks > 1 else ''}",
        "params": -(-size.params // size.ranks),
        "subgroup_params": 1e8,
        "forward_s": size.forward_s,
        "backward_s": size.backward_s,
    }
    workload = workload_from(values, "the size")
    if size.forward_s or size.backward_s:
        return workload
    return replace(workload, notes=("forward and backward are not known: only the update is replayed",))


def resolve_machine(name_or_path: str | None, trace: Trace | None) -> Machine:
    """Return a machine by name or file, or the one that was recorded in the trace.

    Raises:
        MachineError: There is no such machine, or none was named or recorded.
    """
    if trace is None:
        return find_machine(name_or_path)
    return find_machine(name_or_path, trace.meta.machine, recorded_in=str(trace.path))


def share_box(machine: Machine, ranks_per_host: int | None, trace: Trace | None) -> Machine:
    """Return the machine with the rates of one of several ranks on a host.

    Args:
        machine: The machine.
        ranks_per_host: Ranks on a host as requested; None: as many as the trace had, if the machine has a `box`, else
            the rates as they are.
        trace: The trace of the job. A simulated one is of a single rank whose machine is scaled already.

    Raises:
        MachineError: A number was requested and the machine's totals are not known.
    """
    if ranks_per_host is not None:
        return machine.for_ranks(ranks_per_host)
    if trace is None or machine.box is None or trace.meta.source == "simulated":
        return machine
    from ebbtide.interleave.replay.workload_from_trace import ranks_on_host

    recorded = ranks_on_host(trace)
    return machine if recorded is None else machine.for_ranks(recorded)


def note_other_machine(workload: Workload, machine: Machine, trace: Trace | None) -> Workload:
    """Add a note to the workload of a trace if the machine is not the one of the trace.

    Times of forward and backward, and the free memory, are those of the recording on any machine.
    """
    if trace is None:
        return workload
    other = _other_machine(machine, trace)
    if other is None:
        return workload
    note = f"the trace was recorded on {other}: forward, backward and free memory are replayed as recorded"
    return replace(workload, notes=(*workload.notes, note))


def _other_machine(machine: Machine, trace: Trace) -> str | None:
    """Return the machine of a trace in words if it is known to be another one."""
    if trace.meta.machine is not None:
        name = trace.meta.machine.get("name")
        return f"the machine {name}" if name != machine.name else None
    device = trace.meta.ranks[0].main_device if trace.meta.ranks else None
    capacity = device.capacity_bytes if device is not None and device.kind == "cuda" else None
    if not capacity or not machine.gpu_memory_bytes:
        return None
    if abs(capacity / machine.gpu_memory_bytes - 1) <= _SAME_CAPACITY:
        return None
    return f"a GPU of {bytes_text(capacity)}, not {bytes_text(machine.gpu_memory_bytes)}"


def load_policies(path: Path) -> None:
    """Run a Python file of the user that registers policies.

    Raises:
        PolicyError: The file cannot be run.
    """
    spec = importlib.util.spec_from_file_location(f"ebbtide_policies_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise PolicyError(f"{path} is not a Python file that registers policies")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise PolicyError(f"{path} cannot be run: {error!r}") from error
