"""Marks in recorded jobs: they lie between the job's own readings of the same clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import ebbtide
from ebbtide.features.cycles.cycles import find_cycles
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import run_process

JOB = """
import json, sys, time
import torch
import ebbtide
from ebbtide.profiler import Tracer

model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
readings = []

def part(name, work):
    outside = time.monotonic_ns()
    with ebbtide.step(name):
        inside = time.monotonic_ns()
        work()
        inside_end = time.monotonic_ns()
    readings.append([name, outside, inside, inside_end, time.monotonic_ns()])

def rollout():
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(4, 32))
            time.sleep(0.001)

def update():
    for _ in range(3):
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

@ebbtide.step("whole")
def cycle():
    part("rollout", rollout)
    part("Bewertung \\u00fcber viele W\\u00f6rter, l\\u00e4nger als 32 Bytes", lambda: None)
    part("update", update)

with Tracer(sys.argv[1]):
    for _ in range(4):
        cycle()
with ebbtide.step("after"):
    pass
json.dump(readings, open(sys.argv[2], "w"))
"""
LONG_NAME = "Bewertung über viele Wörter, länger als 32 Bytes"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[list[int]]]:
    """Return the trace of the job, and its own readings of each part."""
    folder = tmp_path_factory.mktemp("marks")
    script, own = folder / "job.py", folder / "own.json"
    script.write_text(JOB)
    done = run_process([sys.executable, script, folder / "run.ebb", own])
    assert done.returncode == 0, done.stderr
    return open_trace(folder / "run.ebb"), json.loads(own.read_text())


def test_marks__lie_between_the_readings_of_the_job(
    job: tuple[Trace, list[list[int]]],
) -> None:
    trace, readings = job
    marks = trace.marks(0)
    parts = marks[marks["name"] != "whole"]
    assert parts["name"].tolist() == [name for name, *_ in readings]
    assert LONG_NAME in parts["name"].tolist()
    for mark, (_, outside, inside, inside_end, outside_end) in zip(
        parts.itertuples(), readings, strict=True
    ):
        assert outside <= mark.start_ns <= inside
        assert inside_end <= mark.end_ns <= outside_end
    assert marks["gpu_start_ns"].isna().all()


def test_marks__that_contain_all_others_are_the_cycles(
    job: tuple[Trace, list[list[int]]],
) -> None:
    trace, _ = job
    cycles = find_cycles(trace, 0)
    assert cycles is not None
    assert (cycles.source, cycles.count, cycles.warmup) == ("marks", 4, 1)
    assert cycles.iterations == 3
    names = [part.name for part in cycles.parts if part.name != "other"]
    assert names == ["rollout", LONG_NAME, "update"]
    assert sum(part.share for part in cycles.parts) == pytest.approx(1, abs=0.01)
    assert cycles.longest.name in ("rollout", "update")


def test_step__does_nothing_where_nobody_records(tmp_path: Path) -> None:
    calls = []

    @ebbtide.step("part")
    def part(value: int) -> int:
        calls.append(value)
        return value + 1

    assert [part(1), part(2)] == [2, 3]
    with pytest.raises(ZeroDivisionError), ebbtide.step("part"):
        raise ZeroDivisionError
    assert calls == [1, 2]
