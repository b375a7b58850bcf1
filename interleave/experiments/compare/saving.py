"""Measured and predicted schedules as traces, a folder of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ebbtide.interleave.experiments.compare.results import Comparison
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import TraceBuilder


def save_traces(found: Comparison, folder: Path) -> None:
    """Of each policy POLICY.measured.ebb, the iteration whose update is the median, and POLICY.predicted.ebb."""
    on = f"on an emulated device, at {found.box.link_bytes_per_s:g} B/s" if found.box.emulated else found.box.name
    for result in found.results:
        name = file_name(result.policy)
        measured = _trace(result.measured, found.box.machine)
        measured.meta["source"] = "recorded"
        measured.note(f"measured by ebbtide compare {on}: one iteration")
        measured.write(folder / f"{name}.measured.ebb")
        predicted = _trace(result.predicted, found.box.machine)
        predicted.note(f"predicted by ebbtide compare for what it measured {on}")
        predicted.write(folder / f"{name}.predicted.ebb")


def _trace(schedule: Schedule, machine: Machine) -> TraceBuilder:
    # The budget for state tells nothing of what the job itself leaves free.
    job = replace(schedule.workload, gpu_free=None)
    return trace_of(replace(schedule, workload=job), machine, iterations=1)
