"""Outputs about traces of dry runs, which say that they are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.analysis.metrics.prediction import evidence_of
from ebbtide.analysis.plot import draw
from ebbtide.cli import run
from ebbtide.features.export.chrome_trace import write_chrome_trace
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.profiler.trace import Trace, TraceBuilder

Printed = pytest.CaptureFixture[str]
LINE = "predicted by a dry run, not measured (machine h200)"
BY = ("link", "iteration", "activity", "substep")
COMMANDS = (
    "summary",
    "memory",
    "windows",
    "findings",
    *(f"summary --by {key}" for key in BY),
)


@pytest.fixture
def predicted(tmp_path: Path) -> Trace:
    times = [
        {
            "rank": 0,
            "iteration": number,
            "phase": phase,
            "low_ms": 1.0 + number,
            "high_ms": 3.0 + number,
        }
        for number in range(3)
        for phase in ("iteration", "forward", "backward", "update")
    ]
    prediction = {"machine": "h200", "assumptions": {}, "times": times}
    builder = TraceBuilder("predicted", warmup_iterations=1, prediction=prediction)
    device = {"device": "cuda:0", "kind": "cuda", "capacity_bytes": 1 << 30}
    rank = builder.rank(
        0, devices=[device], model={"params": 1000}, first_iteration_start_ns=0
    )
    for number in range(3):
        for step, phase in enumerate(("forward", "backward", "update")):
            start = (3 * number + step) * 1_000_000
            rank.phase(phase, start, start + 1_000_000, number)
            rank.kernel(start, start + 500_000)
    rank.memory(0, 1000, "allocated")
    return builder.write(tmp_path / "run.ebb")


def test_commands__say_that_a_trace_is_predicted(
    predicted: Trace, capsys: Printed
) -> None:
    for command in COMMANDS:
        assert run([*command.split(), str(predicted.path)]) == 0
        assert LINE in capsys.readouterr().out
        assert run([*command.split(), str(predicted.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["predicted"] is True


def test_report__says_how_far_to_trust_the_iteration(
    predicted: Trace, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(predicted.path), "-o", str(page)]) == 0
    evidence = evidence_of(predicted)
    assert evidence is not None
    assert f"80 % range; {evidence.text}" in page.read_text()


def test_summary__has_the_range_of_each_time(predicted: Trace, capsys: Printed) -> None:
    assert run(["summary", str(predicted.path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    evidence = evidence_of(predicted)
    assert evidence is not None
    ends = [3.0 * factor for factor in (evidence.low, evidence.high)]
    assert [printed[f"iteration_{end}_ms"] for end in ("low", "high")] == ends
    assert printed["range_is_guess"] is evidence.is_guess
    assert printed["trust"] == {
        "sources": len(evidence.near),
        "held": round(evidence.covered),
        "nearest": list(evidence.near),
    }
    # The medians of iterations 1 and 2.
    ranges = {
        phase["phase"]: (phase["low_ms"], phase["high_ms"])
        for phase in printed["phases"]
    }
    assert ranges == {
        **dict.fromkeys(("forward", "backward", "update"), (2.5, 4.5)),
        "other": (None, None),
    }


def test_diff__tells_which_run_is_predicted(
    predicted: Trace, tmp_path: Path, capsys: Printed
) -> None:
    builder = TraceBuilder("recorded")
    builder.rank(0).phase("forward", 0, 5, 0)
    recorded = builder.write(tmp_path / "recorded.ebb")
    assert run(["diff", str(predicted.path), str(recorded.path)]) == 0
    first, second = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("A:", "B:"))
    )
    assert "predicted" in first
    assert "predicted" not in second


def test_pictures_exports_and_workloads__say_that_a_trace_is_predicted(
    predicted: Trace, tmp_path: Path
) -> None:
    assert "run (predicted)" in draw([predicted], kind="activity").get_label()
    write_chrome_trace(predicted, tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "rank 0 · predicted"
    assert workload_of(predicted).notes[0] == f"times and memory are {LINE}"
