"""Tests of the sources of a replay: its workload and its machine."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.errors import MachineError
from ebbtide.interleave.replay.inputs import (
    NETWORK_NOTE,
    JobSize,
    note_other_machine,
    resolve_machine,
    resolve_workload,
    share_box,
    with_min_free,
    workload_of_size,
)
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.findings.jobs import CAPACITY, offloaded
from tests.interleave.job_files import MACHINE, machine


def test_resolve_machine__takes_the_recorded_one_by_default() -> None:
    trace = TraceBuilder("simulated", machine=MACHINE | {"name": "recorded"}).build()
    assert resolve_machine(None, trace).name == "recorded"
    assert resolve_machine("a100-40gb-published", trace).name == "a100-40gb-published"
    with pytest.raises(MachineError, match="there is no machine: name one"):
        resolve_machine(None, None)


@pytest.mark.parametrize(
    ("share", "noted"), [(1.0, False), (0.97, False), (0.5, True), (1.5, True)]
)
def test_note_other_machine__compares_the_memory_of_the_gpu(
    share: float, noted: bool
) -> None:
    trace = offloaded(1).trace
    workload = resolve_workload(trace, None)
    after = note_other_machine(
        workload, machine(gpu_memory_bytes=share * CAPACITY), trace
    )
    assert after.notes[: len(workload.notes)] == workload.notes
    new_notes = after.notes[len(workload.notes) :]
    assert len(new_notes) == noted
    if share < 1 and noted:
        lacking = CAPACITY - share * CAPACITY
        assert workload.gpu_free is not None
        assert after.gpu_free is not None
        assert [size for _, size in after.gpu_free] == [
            max(0.0, size - lacking) for _, size in workload.gpu_free
        ]
        assert after.missing_bytes == max(
            0.0, lacking - min(size for _, size in workload.gpu_free)
        )
        assert all("so much less is free" in note for note in new_notes)
        # What the user states to be free is.
        stated = note_other_machine(
            workload,
            machine(gpu_memory_bytes=share * CAPACITY),
            trace,
            free_is_stated=True,
        )
        assert stated.gpu_free == workload.gpu_free
    else:
        assert all(
            "forward, backward and free memory are replayed as recorded" in note
            for note in new_notes
        )


def test_note_other_machine__says_that_a_job_ran_on_the_cpu() -> None:
    job = offloaded(1)
    workload = resolve_workload(job.trace, None)
    job.builder.rank(0).meta["devices"] = [{"device": "cpu", "kind": "cpu"}]
    (note,) = note_other_machine(workload, machine(), job.builder.build()).notes[
        len(workload.notes) :
    ]
    assert note.startswith(
        "the trace was recorded on a CPU: forward, backward and free memory are "
        "replayed"
    )


def test_note_other_machine__compares_the_name_of_a_recorded_machine() -> None:
    trace = TraceBuilder("simulated", machine=MACHINE | {"name": "recorded"}).build()
    workload = resolve_workload(offloaded(1).trace, None)
    assert note_other_machine(workload, resolve_machine(None, trace), trace) == workload
    (note,) = set(
        note_other_machine(workload, machine(name="other"), trace).notes
    ) - set(workload.notes)
    assert note.startswith("the trace was recorded on the machine recorded: ")
    # Nothing is known of a workload without a trace.
    assert note_other_machine(workload, machine(), None) == workload


BOX = {"ranks": 4, "cpu_update_params_per_s": 9.2e9, "host_memory_bytes_per_s": 336e9}


def trace_of_ranks(count: int, source: str = "recorded", **values: Any) -> Trace:
    builder = TraceBuilder(source, machine=MACHINE)
    for rank in range(count):
        builder.rank(rank, **values)
    return builder.build()


def test_share_box__takes_the_requested_number_then_that_of_the_trace_then_that_of_the_machine() -> (
    None
):
    shared, trace = machine(box=BOX), trace_of_ranks(8)
    assert share_box(shared, 16, trace) == shared.for_ranks(16)
    assert share_box(shared, None, trace) == shared.for_ranks(8)
    assert share_box(shared, None, None) == shared
    # Another machine has no more ranks on a host than GPUs.
    other = machine(name="other", box=BOX)
    assert share_box(other, None, trace) == other.for_ranks(4)
    assert (
        NETWORK_NOTE
        in note_other_machine(workload_of_size(JobSize(10**9)), other, trace).notes
    )
    assert shared.for_ranks(8).cpu_update_params_per_s == 9.2e9 / 8


def test_share_box__without_a_box_only_a_request_is_an_error() -> None:
    assert share_box(machine(), None, trace_of_ranks(8)) == machine()
    with pytest.raises(MachineError, match="`ebbtide calibrate --ranks 8`"):
        share_box(machine(), 8, None)


def test_share_box__does_not_guess_from_some_ranks_of_a_job_or_from_a_simulation() -> (
    None
):
    shared = machine(box=BOX)
    # The other ranks may have run on the same host.
    assert share_box(shared, None, trace_of_ranks(1, world_size=8)) == shared
    # A simulated trace has one rank, whose machine is scaled already.
    assert share_box(shared, None, trace_of_ranks(1, "simulated")) == shared
    # All ranks of the first rank's host were recorded.
    assert share_box(
        shared, None, trace_of_ranks(2, world_size=8, host="first")
    ) == shared.for_ranks(2)


def test_resolve_workload__free_bytes_are_the_least_and_windows_remain() -> None:
    trace = offloaded(1).trace
    recorded = resolve_workload(trace, None)
    stated = resolve_workload(trace, None, free_bytes=2**30)
    assert stated.min_free_bytes == 2**30
    assert stated.gpu_free == with_min_free(recorded.gpu_free, 2**30)
    assert resolve_workload(None, None, JobSize(10**9), 2**30).gpu_free == (
        (0.0, 2**30),
    )
