"""Traces of old versions of torch, of other accelerators, without phases, and of other
tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.analysis import TraceAnalysis
from ebbtide.features.importers.source import SourceError
from ebbtide.profiler.trace.trace import closing_lines
from tests.features.importers.kineto.made_kineto import import_files, span, write_trace
from tests.features.importers.kineto.test_phases import rows


def test_find_phases__steps_without_phases_are_iterations(tmp_path: Path) -> None:
    steps = [
        span(f"ProfilerStep#{number}", 10 * number, 10 * number + 9)
        for number in range(2, 5)
    ]
    ops = [
        span("aten::mm", 10 * number + 1, 10 * number + 2, "cpu_op")
        for number in range(2, 5)
    ]
    trace = import_files(write_trace(tmp_path / "run.json", [*steps, *ops]))
    summary = TraceAnalysis(trace).summary()
    assert (summary.iterations, summary.iteration_ms) == (
        3,
        pytest.approx(0.01, abs=0.002),
    )
    assert [phase.median_ms for phase in summary.phases] == [None] * 4
    assert ", 3 iterations on 1 rank" in closing_lines(trace)[0]
    (note,) = [note for note in trace.notes if "does not mark phases" in note]
    assert "record the CPU" not in note


def test_find_phases__takes_nodes_of_old_versions_as_backward(tmp_path: Path) -> None:
    """torch 1.9 records the nodes of the graph, and not the functions of the engine
    around them."""
    events = []
    for number in range(3):
        ts = 100 * number
        events += [
            span("aten::mm", ts, ts + 10, "Operator", **{"Sequence number": 2 * number}),
            span("aten::nll_loss", ts + 10, ts + 20, "Operator", **{"Sequence number": 2 * number + 1}),
            span("NllLossBackward", ts + 30, ts + 40, "Operator",
                 **{"Fwd thread id": 1, "Sequence number": 2 * number + 1}),
            span("MmBackward", ts + 40, ts + 50, "Operator", **{"Fwd thread id": 1, "Sequence number": 2 * number}),
            span("torch::autograd::AccumulateGrad", ts + 50, ts + 60, "Operator"),
            span("Optimizer.step#SGD.step", ts + 70, ts + 90, "Operator"),
        ]  # fmt: skip
    expected = [
        (phase, 100 * number + start, 100 * number + end)
        for number in range(3)
        for phase, start, end in (
            ("forward", 0, 20),
            ("backward", 30, 60),
            ("update", 70, 90),
        )
    ]
    assert rows(write_trace(tmp_path / "run.json", events)) == expected


def test_read_trace__refuses_chrome_traces_of_other_tools(tmp_path: Path) -> None:
    events = [
        span("cuMemAlloc", 10 * number, 10 * number + 1, "cuda_api_ebpf")
        for number in range(3)
    ]
    with pytest.raises(SourceError, match=r"no events of torch\.profiler"):
        import_files(write_trace(tmp_path / "run.json", events))


def test_kernels__of_mtia_are_device_work(tmp_path: Path) -> None:
    call = span("launch", 0, 1, "mtia_runtime", correlation=5)
    kernel = span("fba_mm", 2, 6, "mtia_ccp_events", correlation=5, device=0, stream=1)
    trace = import_files(write_trace(tmp_path / "run.json", [call, kernel]))
    kernels = trace.kernels(0)
    assert [(kernels["name"][0], kernels["kind"][0])] == [("fba_mm", "compute")]
    assert kernels["end_ns"][0] - kernels["start_ns"][0] == 4000
    assert kernels["start_ns"][0] - kernels["launch_ns"][0] == 2000
