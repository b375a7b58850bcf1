"""Phases and iterations from real traces of small CPU jobs, and from made traces of
other cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from ebbtide.analysis import TraceAnalysis
from tests.conftest import FUZZ, slow_case
from tests.features.importers.kineto.made_kineto import (
    BASE,
    Event,
    Job,
    base,
    import_files,
    iteration,
    named,
    profiled,
    shape,
    span,
    write_trace,
)

# Names without words of phases, to mark in the trace what the job did.
FIRST, SECOND = "part one", "part two"


def accumulating(job: Job) -> Callable[[int], None]:
    """Return a step of two micro-steps, with an evaluation after the update and a value
    read."""

    def step(number: int) -> None:
        for _ in range(2):
            with record_function(FIRST):
                loss = job.forward()
            with record_function(SECOND):
                loss.backward()
        job.update()
        with torch.no_grad():
            job.forward()
        loss.item()

    return step


def assert_inside(phases: pd.DataFrame, path: Path, name: str) -> None:
    """Assert that there is one phase inside each annotated span."""
    spans = named(path, name)
    assert len(phases) == len(spans) > 0
    for row, within in zip(phases.itertuples(), spans, strict=True):
        assert (
            within["start"]
            <= row.start_ns - base(path)
            < row.end_ns - base(path)
            <= within["end"]
        )


def of(phases: pd.DataFrame, phase: str) -> pd.DataFrame:
    return phases[phases["phase"] == phase]


@pytest.mark.parametrize("with_stack", [slow_case(False), True])
def test_find_phases__numbers_micro_steps_and_leaves_out_evaluations(
    tmp_path: Path, with_stack: bool
) -> None:
    job = Job()
    path = profiled(
        tmp_path / "run.json",
        5,
        accumulating(job),
        with_stack=with_stack,
        record_shapes=with_stack,
    )
    trace = import_files(path)
    phases = trace.phases(0)
    assert shape(phases) == {2: "fbfbu", 3: "fbfbu", 4: "fbfbu"}
    (begin,) = named(path, "ProfilerStep#2")
    assert trace.rank(0).first_iteration_start_ns == begin["start"] + base(path)
    assert phases["micro_step"].tolist() == [0, 0, 1, 1, 1] * 3
    assert_inside(of(phases, "forward"), path, FIRST)
    assert_inside(of(phases, "backward"), path, SECOND)
    updates = named(path, "Optimizer.step#AdamW.step")
    assert (of(phases, "update")["start_ns"] - base(path)).tolist() == [
        event["start"] for event in updates
    ]
    assert (of(phases, "update")["end_ns"] - base(path)).tolist() == [
        event["end"] for event in updates
    ]
    assert phases["gpu_start_ns"].isna().all()


def test_find_phases__forwards_are_the_recorded_calls(tmp_path: Path) -> None:
    path = profiled(tmp_path / "run.json", 4, accumulating(Job()), with_stack=True)
    calls = named(path, "nn.Module: Sequential_0")
    forwards = of(import_files(path).phases(0), "forward")
    training = [call for number, call in enumerate(calls) if number % 3 < 2]
    assert (forwards["start_ns"] - base(path)).tolist() == [
        call["start"] for call in training
    ]
    assert (forwards["end_ns"] - base(path)).tolist() == [
        call["end"] for call in training
    ]


def test_find_phases__uses_annotations_that_name_phases(tmp_path: Path) -> None:
    job = Job()

    def step(number: int) -> None:
        with (
            record_function("## forward ##"),
            record_function("## forward:all of it ##"),
        ):
            loss = job.forward()
        with record_function("trainer.backward"):
            loss.backward()
        job.update()

    path = profiled(tmp_path / "run.json", 4, step)
    phases = import_files(path).phases(0)
    assert shape(phases) == {2: "fbu", 3: "fbu"}
    for phase, name in (("forward", "## forward ##"), ("backward", "trainer.backward")):
        assert (of(phases, phase)["start_ns"] - base(path)).tolist() == [
            e["start"] for e in named(path, name)
        ]
        assert (of(phases, phase)["end_ns"] - base(path)).tolist() == [
            e["end"] for e in named(path, name)
        ]


def test_find_phases__iterations_end_with_updates_without_profiler_steps(
    tmp_path: Path,
) -> None:
    trace = import_files(
        profiled(tmp_path / "run.json", 5, accumulating(Job()), mark=False)
    )
    assert shape(trace.phases(0)) == {0: "fbfbu", 1: "fbfbu", 2: "fbfbu"}
    assert any("prof.step()" in note for note in trace.notes)
    assert trace.rank(0).first_iteration_start_ns is None


def test_find_phases__profiler_steps_of_micro_steps_do_not_end_iterations(
    tmp_path: Path,
) -> None:
    job = Job()

    def micro_step(number: int) -> None:
        job.forward().backward()
        if number % 2:
            job.update()

    assert shape(
        import_files(profiled(tmp_path / "run.json", 8, micro_step)).phases(0)
    ) == {
        0: "fbfbu",
        1: "fbfbu",
        2: "fbfbu",
    }


def test_find_phases__a_skipped_update_is_an_iteration(tmp_path: Path) -> None:
    job = Job()

    def step(number: int) -> None:
        job.forward().backward()
        if number != 3:
            job.update()

    assert shape(import_files(profiled(tmp_path / "run.json", 6, step)).phases(0)) == {
        2: "fbu",
        3: "fb",
        4: "fbu",
        5: "fbu",
    }


@pytest.mark.parametrize("mark", [pytest.param(True, marks=pytest.mark.slow), False])
def test_find_phases__two_optimizers_are_two_updates_of_one_iteration(
    tmp_path: Path, mark: bool
) -> None:
    job = Job()
    other = torch.optim.SGD(job.model[0].parameters(), lr=0.1)

    def step(number: int) -> None:
        job.forward().backward()
        other.step()
        job.update()

    phases = import_files(profiled(tmp_path / "run.json", 4, step, mark=mark)).phases(0)
    assert [*shape(phases).values()] == ["fbuu", "fbuu"]


@pytest.mark.parametrize("mark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_find_phases__steps_per_subgroup_are_one_update(
    tmp_path: Path, mark: bool
) -> None:
    job = Job()

    def step(number: int) -> None:
        job.forward().backward()
        for _ in range(3):
            job.optimizer.step()
        job.optimizer.zero_grad()

    path = profiled(tmp_path / "run.json", 4, step, mark=mark)
    phases = import_files(path).phases(0)
    assert [*shape(phases).values()] == ["fbu", "fbu"]
    steps = named(path, "Optimizer.step#AdamW.step")
    assert (of(phases, "update")["end_ns"] - base(path)).tolist() == [
        steps[2]["end"],
        steps[5]["end"],
    ]


@pytest.mark.parametrize("use_reentrant", [slow_case(True), False])
def test_find_phases__recomputed_forwards_belong_to_the_backward(
    tmp_path: Path, use_reentrant: bool
) -> None:
    job = Job()

    def step(number: int) -> None:
        inputs = torch.randn(8, 16, requires_grad=True)
        with record_function(FIRST):
            loss = (
                checkpoint(job.model, inputs, use_reentrant=use_reentrant)
                .square()
                .mean()
            )
        with record_function(SECOND):
            loss.backward()
        job.update()

    for with_stack in (False, True) if FUZZ > 1 else (use_reentrant,):
        path = profiled(tmp_path / f"{with_stack}.json", 4, step, with_stack=with_stack)
        phases = import_files(path).phases(0)
        assert shape(phases) == {2: "fbu", 3: "fbu"}
        assert_inside(of(phases, "backward"), path, SECOND)


def test_find_phases__a_gradient_inside_a_forward_belongs_to_it(tmp_path: Path) -> None:
    job = Job()

    def step(number: int) -> None:
        inputs = torch.randn(8, 16, requires_grad=True)
        with record_function("forward"):
            energy = job.model(inputs).sum()
            (force,) = torch.autograd.grad(energy, inputs, create_graph=True)
        (force.square().mean() + energy).backward()
        job.update()

    assert shape(import_files(profiled(tmp_path / "run.json", 4, step)).phases(0)) == {
        2: "fbu",
        3: "fbu",
    }


def test_find_phases__a_closure_belongs_to_its_update(tmp_path: Path) -> None:
    job = Job()
    optimizer = torch.optim.LBFGS(job.model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = job.forward()
        loss.backward()
        return loss

    path = profiled(tmp_path / "run.json", 4, lambda number: optimizer.step(closure))
    assert shape(import_files(path).phases(0)) == {2: "u", 3: "u"}


@pytest.mark.slow
def test_find_phases__covers_compiled_models(tmp_path: Path) -> None:
    job = Job()
    job.model = torch.compile(job.model, backend="aot_eager")  # type: ignore[assignment]

    def step(number: int) -> None:
        with record_function(FIRST):
            loss = job.forward()
        with record_function(SECOND):
            loss.backward()
        job.update()

    path = profiled(tmp_path / "run.json", 4, step)
    phases = import_files(path).phases(0)
    assert shape(phases) == {2: "fbu", 3: "fbu"}
    assert_inside(of(phases, "forward"), path, FIRST)
    assert_inside(of(phases, "backward"), path, SECOND)


def test_find_phases__notes_that_inference_has_no_phases(tmp_path: Path) -> None:
    job = Job()

    def step(number: int) -> None:
        with torch.no_grad():
            job.model(torch.randn(8, 16))

    trace = import_files(profiled(tmp_path / "run.json", 4, step))
    assert trace.phases(0).empty
    assert any("it does not mark phases" in note for note in trace.notes)


# -- made traces
# -------------------------------------------------------------------------------------------------------


def ops(
    ts: float, sequence: int, backward: float, number: int = 4
) -> list[dict[str, Any]]:
    """Return ops of a forward and their evaluation by the autograd engine, in reverse
    order."""
    cat = "cpu_op"
    forward = [
        span("aten::mm", ts + i, ts + i + 0.5, cat, **{"Sequence number": sequence + i})
        for i in range(number)
    ]
    name = "autograd::engine::evaluate_function: MmBackward0"
    last = sequence + number - 1
    engine = [
        span(
            name, backward + i, backward + i + 0.5, cat, **{"Sequence number": last - i}
        )
        for i in range(number)
    ]
    return [*forward, *engine]


def rows(path: Path) -> list[tuple[str, float, float]]:
    """Return (phase, start, end) in us after the base."""
    phases = import_files(path).phases(0)
    return [
        (row.phase, (row.start_ns - BASE) / 1000, (row.end_ns - BASE) / 1000)
        for row in phases.itertuples()
    ]


def test_find_phases__separates_backwards_by_forwards_and_updates(
    tmp_path: Path,
) -> None:
    first, second = ops(0, 0, 10), ops(20, 4, 30)
    update = span("Optimizer.step#SGD.step", 40, 42)
    # Two losses of one forward with an update between them: only the update separates
    # their backwards.
    third, fourth = ops(50, 8, 60, 2), ops(52, 10, 70, 2)
    path = write_trace(
        tmp_path / "run.json",
        [
            *first,
            *second,
            update,
            *third,
            span("Optimizer.step#SGD.step", 65, 66),
            *fourth,
        ],
    )
    assert rows(path) == [
        ("forward", 0, 3.5), ("backward", 10, 13.5), ("forward", 20, 23.5), ("backward", 30, 33.5), ("update", 40, 42),
        ("forward", 50, 53.5), ("backward", 60, 61.5), ("update", 65, 66), ("backward", 70, 71.5),
    ]  # fmt: skip


def test_find_phases__ignores_an_op_with_the_number_of_the_next_op(
    tmp_path: Path,
) -> None:
    item = span("aten::item", 45, 46, "cpu_op", **{"Sequence number": 4})
    path = write_trace(tmp_path / "run.json", [*ops(0, 0, 10), item, *ops(50, 4, 60)])
    assert rows(path)[2] == ("forward", 50, 53.5)


def test_find_phases__ignores_later_ops_with_the_same_number(tmp_path: Path) -> None:
    other = [
        span("aten::mm", 30 + i, 30.5 + i, "cpu_op", **{"Sequence number": i})
        for i in range(4)
    ]
    assert rows(write_trace(tmp_path / "run.json", [*ops(0, 0, 10), *other])) == [
        ("forward", 0, 3.5),
        ("backward", 10, 13.5),
    ]


def test_find_phases__leaves_out_annotated_evaluations(tmp_path: Path) -> None:
    evaluation = [span("DistributedDataParallel.forward", 100, 110)]
    training = [span("DistributedDataParallel.forward", 0, 5), *ops(0, 0, 10)]
    assert rows(write_trace(tmp_path / "run.json", [*training, *evaluation])) == [
        ("forward", 0, 5),
        ("backward", 10, 13.5),
    ]


def test_find_phases__ignores_annotations_of_parts(tmp_path: Path) -> None:
    names = (
        "FSDP::pre_forward",
        "FSDP::post_backward_reduce",
        "FullyShardedDataParallel._pre_backward_hook",
        "## alltoall_fwd_single ##",
        "aten::convolution_backward",
        "forward and backward",
        "Optimizer.zero_grad#AdamW.zero_grad",
        "ProfilerStep#",
        "ProfilerStep#12345678901234567890",
        "feedforward",
    )
    parts = [
        span(name, 90.5 + 0.5 * number, 90.75 + 0.5 * number)
        for number, name in enumerate(names)
    ]
    assert rows(write_trace(tmp_path / "run.json", [*iteration(0, 0), *parts])) == rows(
        write_trace(tmp_path / "without.json", iteration(0, 0))
    )


def test_find_phases__recognizes_names_of_annotations(tmp_path: Path) -> None:
    names = {
        "## forward ##": "forward",
        "DistributedDataParallel.forward": "forward",
        "Forward pass": "forward",
        "## optimizer ##": "update",
        "model.forward()": "forward",
        "[pl][profile][Strategy]SingleDeviceStrategy.backward": "backward",
        "loss.backward": "backward",
        "optimizer_step": "update",
    }

    def spans(category: str) -> list[Event]:
        return [
            span(name, 10 * number, 10 * number + 1, category)
            for number, name in enumerate(names)
        ]

    expected = [
        (phase, 10 * number, 10 * number + 1)
        for number, phase in enumerate(names.values())
    ]
    for category in ("user_annotation", "cpu_op", "Operator"):
        assert rows(write_trace(tmp_path / "run.json", spans(category))) == expected
    assert rows(write_trace(tmp_path / "run.json", spans("gpu_user_annotation"))) == []


def test_find_phases__cuts_overlaps_and_drops_nested_annotations(
    tmp_path: Path,
) -> None:
    spans = [
        span("backward", 0, 10),
        span("Optimizer.step#SGD.step", 2, 4),
        span("forward", 8, 12),
        span("forward", 11, 12),
    ]
    assert rows(write_trace(tmp_path / "run.json", spans)) == [
        ("backward", 0, 10),
        ("forward", 10, 12),
    ]


def test_find_phases__a_phase_that_was_not_found_is_null(tmp_path: Path) -> None:
    events = [
        event
        for number in range(3)
        for event in iteration(number, 100 * number)
        if event["name"] != "backward"
    ]
    analysis = TraceAnalysis(import_files(write_trace(tmp_path / "run.json", events)))
    phases = {entry["phase"]: entry for entry in analysis.summary().as_json()["phases"]}
    lengths = {"forward": 0.02, "backward": None, "update": 0.01, "other": 0.07}
    for key, values in (("median_ms", lengths), ("p95_ms", lengths)):
        assert {phase: entry[key] for phase, entry in phases.items()} == pytest.approx(
            values
        )
    assert phases["backward"]["share"] is None
    assert phases["backward"]["iterations_ms"] == [None] * 3
    by_iteration = analysis.iterations().as_json()
    assert "backward" not in {entry["phase"] for entry in by_iteration["spreads"]}
    for row in by_iteration["rows"]:
        assert {phase: row[f"{phase}_ms"] for phase in lengths} == pytest.approx(
            lengths
        )
