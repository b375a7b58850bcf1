"""Where a replay's workload and machine come from."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.errors import MachineError, PolicyError, WorkloadError
from ebbtide.interleave.model.workload import Workload, load_workload, workload_from
from ebbtide.machines.catalog import preset, presets
from ebbtide.machines.machine import Machine, load_machine, machine_from


@dataclass(frozen=True)
class Size:
    """A job that is known by its size alone. params: of the whole model; its state is divided among the ranks."""

    params: int
    ranks: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0


def find_workload(
    trace: Path | None, file: Path | None, size: Size | None = None, free_bytes: int | None = None
) -> Workload:
    """The workload of a trace, a file or a size. free_bytes: of device memory, all the time, instead of what they tell.
    Raises WorkloadError where none, or more than one, is given."""
    found = _found(trace, file, size)
    return found if free_bytes is None else replace(found, gpu_free=((0.0, float(free_bytes)),))


def _found(trace: Path | None, file: Path | None, size: Size | None) -> Workload:
    if sum(source is not None for source in (trace, file, size)) != 1:
        raise WorkloadError("name a trace, a --workload file, or a size (--params): one of the three")
    if file is not None:
        return load_workload(file)
    if size is not None:
        return workload_of_size(size)
    from ebbtide.interleave.replay.workload_from_trace import workload_of
    from ebbtide.profiler.trace import open_trace

    assert trace is not None
    return workload_of(open_trace(trace))


def workload_of_size(size: Size) -> Workload:
    """A workload in bf16 with Adam, in subgroups of 1e8 parameters. Raises WorkloadError for a size that cannot be."""
    if size.params < 1 or size.ranks < 1:
        raise WorkloadError("--params and --ranks must be at least 1")
    values = {
        "name": f"{size.params / 1e9:.3g} G parameters on {size.ranks} rank{'s' if size.ranks > 1 else ''}",
        "params": -(-size.params // size.ranks),
        "subgroup_params": 1e8,
        "forward_s": size.forward_s,
        "backward_s": size.backward_s,
    }
    found = workload_from(values, "the size")
    if size.forward_s or size.backward_s:
        return found
    return replace(found, notes=("forward and backward are not known: only the update is replayed",))


def load_policies(path: Path) -> None:
    """Run a Python file of the user's, which registers policies. Raises PolicyError where it cannot be run."""
    spec = importlib.util.spec_from_file_location(f"ebbtide_policies_{path.stem}", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise PolicyError(f"{path} is not a Python file that registers policies")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise PolicyError(f"{path} cannot be run: {error!r}") from error


def find_machine(asked: str | None, trace: Path | None) -> Machine:
    """A machine by file or preset, or the one recorded with the trace. Raises MachineError where there is none."""
    if asked is not None:
        path = Path(asked)
        if os.path.exists(path) or path.suffix == ".json" or path.name != asked:
            return load_machine(path)
        return preset(asked)
    if trace is not None:
        from ebbtide.profiler.trace import open_trace

        recorded = open_trace(trace).meta.get("machine")
        if isinstance(recorded, dict):
            return machine_from(recorded, f"the machine of {trace}")
    raise MachineError(
        "there is no machine: name one with --machine, a file (`ebbtide calibrate` writes it) or one of "
        + ", ".join(presets())
    )
