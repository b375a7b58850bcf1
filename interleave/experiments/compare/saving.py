"""Writes measured and predicted schedules as a folder of traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ebbtide.interleave.experiments.compare.results import Comparison
from ebbtide.interleave.model.schedule import Schedule
from ebbtide.interleave.replay.schedule_to_trace import file_name, trace_of
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import TraceBuilder


def save_traces(comparison: Comparison, folder: Path) -> None:
    """Write POLICY.measured.ebb (the iteration with the median update time) and POLICY.predicted.ebb per policy."""
    testbed = comparison.testbed
    device = f"an emulated device with {testbed.link_bytes_per_s:g} B/s" if testbed.emulated else testbed.name
    for result in comparison.results:
        name = file_name(result.policy)
        measured = _trace(result.measured, testbed.machine)
        measured.meta["source"] = "recorded"
        measured.note(f"measured by ebbtide compare on {device}: one iteration")
        measured.write(folder / f"{name}.measured.ebb")
        predicted = _trace(result.predicted, testbed.machine)
        predicted.note(f"predicted by ebbtide compare for the run on {device}")
        predicted.write(folder / f"{name}.predicted.ebb")


def _trace(schedule: Schedule, machine: Machine) -> TraceBuilder:
    # The budget for state says nothing about the memory that the job itself leaves free.
    workload = replace(schedule.workload, gpu_free=None)
    return trace_of(replace(schedule, workload=workload), machine, iterations=1)
