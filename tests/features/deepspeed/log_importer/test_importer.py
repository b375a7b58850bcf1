"""Logs of today's DeepSpeed, notes on missing parts, and recognition."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.analysis.metrics.summary import summarize
from ebbtide.features.deepspeed.log_importer.importer import DeepSpeedLogImporter
from ebbtide.features.deepspeed.setup import DeepSpeedInfo, deepspeed_of
from ebbtide.features.importers.load import import_trace
from ebbtide.features.importers.source import Source, SourceError
from ebbtide.phases import PHASES
from ebbtide.profiler.trace.metadata import OptimizerInfo
from tests.features.deepspeed.log_importer.made_logs import (
    CONFIG,
    DATA,
    GIB,
    import_log,
    lengths_ms,
    log_line,
    mark_lines,
    step_lines,
    timer_text,
)
from tests.features.deepspeed.log_importer.published_logs import printed_ms


def test_import_trace__places_phases_and_memory_of_a_log_without_times(
    tmp_path: Path,
) -> None:
    trace = import_trace(
        [DATA / "deepspeed-0.19.8-zero3-launcher.log"], tmp_path / "run.ebb"
    )
    assert lengths_ms(trace) == [
        (0, 0, "forward", 47.98), (0, 0, "backward", 445.82), (0, 0, "update", 42.09),
        (1, 0, "forward", 18.92), (1, 0, "backward", 410.62), (1, 0, "update", 41.91),
    ]  # fmt: skip
    rows = trace.memory(0)
    phases = trace.phases(0)
    starts, ends = phases["start_ns"].to_numpy(), phases["end_ns"].to_numpy()
    assert (starts[1:] == ends[:-1]).all()
    allocated = rows[rows["pool"] == "allocated"]
    # At the beginning of the first backward 0.39 GiB, within it 0.41 at most, and 0.41
    # at its end.
    within = allocated[
        (allocated["t_ns"] >= starts[1]) & (allocated["t_ns"] <= ends[1])
    ]
    assert within["bytes"].iloc[-1] == round(0.41 * GIB)
    assert within.groupby("t_ns")["bytes"].last().tolist() == [
        round(g * GIB) for g in (0.39, 0.41, 0.41)
    ]
    assert (
        list(trace.ops(0)["name"])
        == ["bwd_inner", "bwd_allreduce", "optimizer_step"] * 2
    )
    assert (trace.rank(0).world_size, trace.ranks) == (2, [0, 1])
    assert deepspeed_of(trace).info == DeepSpeedInfo()
    assert [note.split(":")[0] for note in trace.notes] == [
        "the log has no times of day",
        "allocated and reserved memory between two marks of the log is the peak "
        "between them, reserved in whole GiB",
        "the log has no DeepSpeed configuration (json = ...)",
        "the log does not state the number of parameters",
        "the log has timers of rank 0 only",
        "memory marks without a time or a phase are left out",
        "the capacity of the device is not known, so free memory cannot be computed",
    ]
    assert "left out: 2" in trace.notes[5]


@pytest.mark.parametrize(
    ("name", "ranks", "stage", "micro_steps"),
    [("zero2-accumulation", 1, 2, 3), ("zero3-torchrun", 2, 3, 2)],
)
def test_import_trace__reads_logs_with_gradient_accumulation(
    tmp_path: Path, name: str, ranks: int, stage: int, micro_steps: int
) -> None:
    log = DATA / f"deepspeed-0.19.8-{name}.log"
    trace = import_trace([log], tmp_path / "run.ebb")
    config = deepspeed_of(trace).info.config
    assert (
        config["zero_optimization"]["stage"],
        config["gradient_accumulation_steps"],
    ) == (stage, micro_steps)
    assert config["zero_optimization"]["sub_group_size"] == 3e5
    assert deepspeed_of(trace).info.version == "0.19.8"
    assert trace.rank(0).optimizers == (OptimizerInfo(class_name="DeepSpeedCPUAdam"),)
    assert trace.ranks == list(range(ranks))
    for number, printed in enumerate(printed_ms(log)):
        rows = [row for row in lengths_ms(trace) if row[0] == number]
        assert len(rows) == 2 * micro_steps + 1
        for phase in PHASES:
            assert sum(row[3] for row in rows if row[2] == phase) == pytest.approx(
                printed[phase], abs=1e-6
            )
    allocated = trace.memory(0)[lambda rows: rows["pool"] == "allocated"]
    # The marks of setting up have no place; all others do, each at a beginning or an
    # end.
    printed_gib = re.findall(r"\bMA ([\d.]+) GB", log.read_text())
    points = set(trace.phases(0)[["start_ns", "end_ns"]].to_numpy().ravel())
    assert len(allocated[allocated["t_ns"].isin(points)]) == len(printed_gib) - 2
    assert [note for note in trace.notes if "left out: 2" in note]


@pytest.mark.parametrize(
    ("lines", "phases", "notes"),
    [
        (
            mark_lines(1, "forward") + mark_lines(2, "forward", where="after"),
            0,
            ["no timers of whole steps"],
        ),
        (step_lines(), 5, ["has no memory marks"]),
        ([log_line(0, CONFIG), *step_lines()], 5, []),
        (
            [log_line(0, CONFIG.replace('"stage":', '"stage"')), *step_lines()],
            5,
            ["a damaged DeepSpeed configuration"],
        ),
        (
            [log_line(0, CONFIG[:60]), *step_lines()],
            5,
            ["a damaged DeepSpeed configuration"],
        ),
        (
            [log_line(0, "dist_world_size=2"), *step_lines()],
            5,
            ["the log has timers of rank 0 only"],
        ),
    ],
)
def test_import_trace__notes_exactly_what_is_missing(
    tmp_path: Path, lines: list[str], phases: int, notes: list[str]
) -> None:
    trace = import_log(tmp_path, lines)
    assert summarize(trace).iterations == phases
    expected = {
        "no timers of whole steps": phases == 0,
        "has no memory marks": phases > 0,
        "no DeepSpeed configuration": "json" not in " ".join(lines),
        "a damaged DeepSpeed configuration": "damaged" in " ".join(notes),
        "number of parameters": True,
        "number of ranks: 1 is assumed": "dist_world_size" not in " ".join(lines),
        "rank 0 only": "dist_world_size" in " ".join(lines),
        "without a time zone": True,
        "no times of day": False,
        "left out": False,
    }
    assert {
        text: any(text in note for note in trace.notes) for text in expected
    } == expected
    for text in notes:
        assert any(text in note for note in trace.notes)


@pytest.mark.parametrize(
    "lines",
    [
        ["deepspeed was here"],
        [log_line(0, "DeepSpeedEngine configuration:"), log_line(0, CONFIG)],
        [log_line(1, timer_text(fwd=1, bwd=2))],
        [
            "MA 1.0 GB         Max_MA 1.0 GB         CA 2.0 GB         Max_CA 3 GB",
            "DeepSpeed",
        ],
    ],
)
def test_import_trace__refuses_a_log_without_steps_and_marks(
    tmp_path: Path, lines: list[str]
) -> None:
    with pytest.raises(SourceError, match="turn on wall_clock_breakdown"):
        import_log(tmp_path, lines)
    assert not (tmp_path / "run.ebb").exists()


def test_matches__decides_by_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    for text, expected in [
        ("\n" * 1000 + step_lines()[0], True),
        ("time (ms) | fwd: 1.00", True),
        ("MA 1.0 GB         Max_MA 1.0 GB", True),
        ("a novel about the deep sea", False),
        ("DeepSpeed\0", True),
        ("DeepSpeed\1", False),
        ("\n" * 100_001 + "DeepSpeed", False),
    ]:
        file.write_text(text)
        assert DeepSpeedLogImporter().matches(Source(file)) is expected
