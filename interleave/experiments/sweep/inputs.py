"""Workloads and machines by name, each name for one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.resolve import find_machine, find_workload
from ebbtide.machines.machine import Machine

Named = TypeVar("Named", Workload, Machine)


def find_pairs(
    traces: Sequence[Path], files: Sequence[Path], machines: Sequence[str]
) -> list[tuple[Workload, Machine]]:
    """Each workload with each machine, or, where none is named, with the one recorded in its trace. What shares a name
    with another is called by its path. Raises WorkloadError and MachineError for what is none."""
    sources: list[tuple[Path | None, Path | None]] = [*((path, None) for path in traces), *((None, f) for f in files)]
    workloads = _apart([(find_workload(*source), str(source[0] or source[1])) for source in sources])
    if machines:
        boxes = _apart([(find_machine(asked, None), asked) for asked in machines])
        return [(workload, box) for workload in workloads for box in boxes]
    recorded = _apart([(find_machine(None, trace), f"the machine of {trace or file}") for trace, file in sources])
    return list(zip(workloads, recorded, strict=True))


def _apart(found: Sequence[tuple[Named, str]]) -> list[Named]:
    """Things and where they are from: those of one name that are not the same take the other name."""
    return [
        replace(thing, name=source) if any(thing.name == other.name and thing != other for other, _ in found) else thing
        for thing, source in found
    ]
