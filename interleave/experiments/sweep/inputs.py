"""Reads the workloads and machines of a sweep, and gives each a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.resolve import resolve_machine, resolve_workload
from ebbtide.machines.catalog import find_machine
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace, open_trace

Named = TypeVar("Named", Workload, Machine)


def find_pairs(
    traces: Sequence[Path], files: Sequence[Path], machines: Sequence[str]
) -> list[tuple[Workload, Machine]]:
    """Pair each workload with each machine.

    Args:
        traces: Traces whose workloads are replayed.
        files: Workload files.
        machines: Machine files or names of presets; if there are none, each trace goes with its recorded machine.

    Returns:
        The pairs. Different workloads or machines with the same name are named by their paths instead.

    Raises:
        WorkloadError: A workload cannot be read.
        MachineError: A machine cannot be read, or a trace has none.
    """
    sources: list[tuple[Trace | None, Path]] = [
        *((open_trace(path), path) for path in traces),
        *((None, path) for path in files),
    ]
    workloads = _distinct_names(
        [(resolve_workload(trace, None if trace else path), str(path)) for trace, path in sources]
    )
    if machines:
        named_machines = _distinct_names([(find_machine(text), text) for text in machines])
        return [(workload, machine) for workload in workloads for machine in named_machines]
    recorded = _distinct_names([(resolve_machine(None, trace), f"the machine of {path}") for trace, path in sources])
    return list(zip(workloads, recorded, strict=True))


def _distinct_names(items: Sequence[tuple[Named, str]]) -> list[Named]:
    """Rename each item to its source if another item has the same name and differs from it."""
    return [
        replace(item, name=source) if any(item.name == other.name and item != other for other, _ in items) else item
        for item, source in items
    ]
