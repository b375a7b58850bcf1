"""Phases and iterations from the names of NVTX ranges."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from ebbtide.features.importers.kineto.phases import FoundPhases
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.nsys.phases import RangeMeaning, RangeNames, phases_of
from ebbtide.features.importers.nsys.sqlite_capture import RANGE_COLUMNS
from ebbtide.features.importers.source import SourceError
from tests.conftest import ebbtide_in_process
from tests.features.importers.nsys.made_exports import MadeExport, import_in_memory

Ranges = list[tuple[str, int, int]]


def derived(ranges: Ranges, stated: dict[str, str] | None = None) -> FoundPhases:
    """Return the phases of ranges (name, start, end), which one thread opened."""
    names = [*dict.fromkeys(name for name, _, _ in ranges)]
    rows = [(0, 0, start, end, names.index(name)) for name, start, end in ranges]
    return phases_of(
        pd.DataFrame(rows, columns=[*RANGE_COLUMNS]),
        names,
        RangeNames(stated or {}),
        [],
    )


def phase_list(phases: FoundPhases) -> list[tuple[str, int, int, int]]:
    """Return name, start, end and iteration of each phase; -1 for phases of no
    iteration."""
    table = phases.phases
    return list(
        zip(
            table["phase"],
            table["start_ns"],
            table["end_ns"],
            table["iteration"].fillna(-1),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("meaning", "names"),
    {
        "forward": (
            "forward|Forward pass|forward_step|fwd|ForwardPass|DDP.forward|iter 3 "
            "forward|train:forward"
        ),
        "backward": (
            "backward|## backward "
            "##|loss.backward|backward_step|BWD|DeepSpeedEngine.backward|batch_backward"
        ),
        "update": (
            "step|update|optimizer|optimizer_step|Optimizer.step#AdamW.step|optim_step "
            "12|weight update|AdamW.step|"
            "DeepSpeedZeroOptimizer_Stage3.step|ParamUpdate"
        ),
        "iteration": (
            "iteration 12|Iter_3|step "
            "12|step_0|step=4|ProfilerStep#12|train_step|Training step|batch 5"
        ),
        "other": (
            "forward_backward|validation_step|eval "
            "forward|optimizer.zero_grad|zero_grad|lr_scheduler.step|epoch 1|"
            "FSDP::pre_forward|post_backward_hook|NCCL:ncclAllReduce|cudnnConvolutionForward|data loading|aten::addmm|"
            "backwards_compatible|stepping|misforward"
        ),
    }.items(),
)  # fmt: skip
def test_range_names__have_a_meaning(meaning: str, names: str) -> None:
    given = RangeNames({})
    assert {
        name: given.meaning(name).value for name in names.split("|")
    } == dict.fromkeys(names.split("|"), meaning)


def test_range_names__are_replaced_by_those_of_the_user() -> None:
    names = RangeNames(
        {"stage*": "forward", "optimizer": "other", "a.b": "update", "never": "forward"}
    )
    assert (
        names.meaning("stage 1")
        == names.meaning("train:stage 2")
        == RangeMeaning.FORWARD
    )
    assert names.meaning("optimizer") == RangeMeaning.OTHER
    assert (names.meaning("a.b"), names.meaning("aXb")) == (
        RangeMeaning.UPDATE,
        RangeMeaning.OTHER,
    )
    assert names.unused == {"never"}


def test_phases__of_nested_ranges_are_the_outermost() -> None:
    inner = [("forward", 25, 30), ("layer.forward", 2, 9), ("backward", 3, 4)]
    phases = derived(
        [*inner, ("backward", 20, 40), ("forward", 0, 15), ("step", 50, 60)]
    )
    assert phase_list(phases) == [
        ("forward", 0, 15, 0),
        ("backward", 20, 40, 0),
        ("update", 50, 60, 0),
    ]


def test_iterations__end_with_updates_and_have_micro_steps() -> None:
    ranges: Ranges = []
    for iteration in range(2):
        for micro_step in range(3):
            t = 100 * iteration + 20 * micro_step
            ranges += [("forward", t, t + 8), ("backward", t + 9, t + 18)]
        ranges += [("optimizer step", 100 * iteration + 70, 100 * iteration + 90)]
    ranges += [("forward", 200, 210)]
    table = derived(ranges).phases
    assert table["micro_step"].tolist()[:7] == [0, 0, 1, 1, 2, 2, 2]
    assert table["iteration"].fillna(-1).tolist() == [0] * 7 + [1] * 7 + [-1]


@pytest.mark.parametrize(
    "name",
    ["step", "train_step", "step {}", "iteration {}", "ProfilerStep#{}", "Update"],
)
def test_iterations__are_ranges_around_forward_and_backward(name: str) -> None:
    ranges: Ranges = []
    for number in (4, 5):
        t = number * 100
        ranges += [
            (name.format(number), t, t + 95),
            ("forward", t, t + 30),
            ("backward", t + 30, t + 60),
        ]
        ranges += [("optimizer.step", t + 60, t + 80)]
    phases = derived(ranges)
    first = 4 if "{}" in name else 0
    assert phase_list(phases)[:3] == [
        ("forward", 400, 430, first),
        ("backward", 430, 460, first),
        ("update", 460, 480, first),
    ]
    assert phases.steps["number"].tolist() == [first, first + 1]
    assert phases.steps["end"].tolist() == [495, 595]


def test_iterations__are_not_micro_steps_that_are_marked() -> None:
    ranges: Ranges = []
    for number in range(6):
        t = number * 100
        ranges += [
            (f"batch {number}", t, t + 90),
            ("forward", t, t + 30),
            ("backward", t + 30, t + 60),
        ]
        ranges += [("optimizer.step", t + 60, t + 80)] if number % 3 == 2 else []
    phases = derived(ranges)
    assert phases.phases["iteration"].tolist() == [0] * 7 + [1] * 7
    assert phases.steps.empty


def test_phase_option__outweighs_what_runs_inside() -> None:
    ranges = [
        ("step", 0, 90),
        ("forward", 0, 30),
        ("backward", 30, 60),
        ("optimizer.step", 60, 80),
    ]
    assert phase_list(derived(ranges, {"step": "update"})) == [("update", 0, 90, 0)]
    assert len(phase_list(derived(ranges, {"step": "other"}))) == 3


def test_phase_option__is_repeatable_on_the_command_line(tmp_path: Path) -> None:
    made = (
        MadeExport(tmp_path / "run.sqlite").range("enc", 0, 10).range("loss=x", 10, 20)
    )
    made.write()
    arguments = ["import", str(made.path), "-o", str(tmp_path / "run.ebb")]
    done = ebbtide_in_process(
        *arguments, "--phase", "enc=forward", "--phase", "loss=x=backward"
    )
    assert done.returncode == 0, done.stderr
    assert "no NVTX range names update" in done.stderr
    for wrong in ("enc", "=forward", "enc=fwd"):
        refused = ebbtide_in_process(*arguments, "--force", "--phase", wrong)
        assert refused.returncode == 2
        assert "assigns no phase" in refused.stderr


def test_phase_option__is_refused_for_files_without_ranges(tmp_path: Path) -> None:
    monitor = tmp_path / "monitor.csv"
    monitor.write_text(
        "timestamp,index,memory.used [MiB]\n2026/01/01 00:00:00.000, 0, 10 MiB\n"
    )
    with pytest.raises(SourceError, match="--phase"):
        import_trace([monitor], tmp_path / "run.ebb", phases={"a": "forward"})


def test_missing_phases__are_named_with_the_ranges_there_are(tmp_path: Path) -> None:
    made = (
        MadeExport(tmp_path / "run.sqlite")
        .range("forward", 0, 10)
        .range("mystery", 10, 20)
    )
    trace = import_in_memory(made.write(), phases={"x": "other"})
    missing, unused = (note for note in trace.notes if "--phase" in note)
    assert "backward or update" in missing
    assert "'mystery'" in missing
    assert "no NVTX range has the name 'x'" in unused
