"""Tests of the sources of a replay: its workload and its machine."""

from __future__ import annotations

import pytest

from ebbtide.errors import MachineError
from ebbtide.interleave.replay.resolve import note_other_machine, resolve_machine, resolve_workload
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.findings.jobs import CAPACITY, offloaded
from tests.interleave.experiments.sweep.sweeps import MACHINE, machine


def test_resolve_machine__takes_the_recorded_one_by_default() -> None:
    trace = TraceBuilder("simulated", machine=MACHINE | {"name": "recorded"}).build()
    assert resolve_machine(None, trace).name == "recorded"
    assert resolve_machine("a100-40gb-published", trace).name == "a100-40gb-published"
    with pytest.raises(MachineError, match="there is no machine: name one"):
        resolve_machine(None, None)


@pytest.mark.parametrize(("share", "noted"), [(1.0, False), (0.97, False), (0.5, True), (1.5, True)])
def test_note_other_machine__compares_the_memory_of_the_gpu(share: float, noted: bool) -> None:
    trace = offloaded(1).trace
    workload = resolve_workload(trace, None)
    after = note_other_machine(workload, machine(gpu_memory_bytes=share * CAPACITY), trace)
    assert after.notes[: len(workload.notes)] == workload.notes
    new_notes = after.notes[len(workload.notes) :]
    assert len(new_notes) == noted
    assert all("forward, backward and free memory are replayed as recorded" in note for note in new_notes)


def test_note_other_machine__compares_the_name_of_a_recorded_machine() -> None:
    trace = TraceBuilder("simulated", machine=MACHINE | {"name": "recorded"}).build()
    workload = resolve_workload(offloaded(1).trace, None)
    assert note_other_machine(workload, resolve_machine(None, trace), trace) == workload
    (note,) = set(note_other_machine(workload, machine(name="other"), trace).notes) - set(workload.notes)
    assert note.startswith("the trace was recorded on the machine recorded: ")
    # Nothing is known of a workload without a trace.
    assert note_other_machine(workload, machine(), None) == workload
