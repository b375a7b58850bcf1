"""Forwards without gradients: a named part of `other` that changes neither phases nor
iterations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
from ebbtide.analysis.metrics.summary import summarize
from ebbtide.analysis.tables.substeps import steps_view
from ebbtide.analysis.tables.summary import summary_view
from ebbtide.analysis.tables.table import Table
from ebbtide.profiler import Tracer
from ebbtide.profiler.agent.without_gradients import NAME
from ebbtide.profiler.trace import Trace, open_trace
from tests.conftest import phases_of
from tests.profiler.agent.jobs import STEPS

TRAIN = """
model, reference = mlp(), mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch()
    {before}
    for micro in range(2):
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""
JOBS = {
    "reference": ("with torch.no_grad(): reference(x)", ""),
    "generation": (
        """with torch.inference_mode():
        for token in range(3):
            model(x)
            time.sleep(0.001)""",
        "",
    ),
    "evaluation": (
        "",
        """if step % 2:
        with torch.no_grad():
            model(x)""",
    ),
    "a phase inside": (
        "",
        """with torch.no_grad():
        outer(x)""",
    ),
    "another thread": (
        "",
        """thread = threading.Thread(target=infer, args=(x,))
    thread.start()
    thread.join()""",
    ),
}
PRELUDE_OF_JOBS = f"""
import threading, time
STEPS = {STEPS}
def infer(x):
    with torch.no_grad():
        model(x)
class Outer(nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            return model(x)
outer = Outer()
"""


# Recorded by the fixture `traced`.
WITHOUT_GRADIENTS = {
    f"without gradients, {name}": PRELUDE_OF_JOBS
    + TRAIN.format(before=before, after=after)
    for name, (before, after) in JOBS.items()
}


@pytest.fixture
def traces(traced: dict[str, Trace]) -> dict[str, Trace]:
    return {name: traced[f"without gradients, {name}"] for name in JOBS}


# Iterations of the rows. In the first, nothing is recorded before its first phase.
ITERATIONS = {
    "reference": [*range(1, STEPS)],
    "generation": [iteration for iteration in range(1, STEPS) for _ in range(3)],
    "evaluation": [iteration + 1 for iteration in range(STEPS) if iteration % 2],
    "a phase inside": [],
    "another thread": [],
}


@pytest.mark.parametrize("name", JOBS)
def test_forwards_without_gradients__are_rows_of_their_iteration(
    name: str, traces: dict[str, Trace]
) -> None:
    ops, spans = traces[name].ops(0), traces[name].phases(0)
    assert set(ops["name"]) <= {NAME}
    assert set(ops["resource"]) <= {"host"}
    # Those after the last iteration belong to none.
    assert ops["iteration"].fillna(STEPS).tolist() == ITERATIONS[name]
    for start, end in zip(ops["start_ns"], ops["end_ns"], strict=True):
        assert start < end
        assert not ((spans["start_ns"] < end) & (spans["end_ns"] > start)).any()


@pytest.mark.parametrize("name", JOBS)
def test_forwards_without_gradients__change_no_phase(
    name: str, traces: dict[str, Trace]
) -> None:
    extra = ["forward"] if name == "a phase inside" else []
    trained = ["forward", "backward", "forward", "backward", "update"]
    assert phases_of(traces[name]) == [trained, *[extra + trained] * (STEPS - 1)]


def test_summary__names_the_part_of_other(traces: dict[str, Trace]) -> None:
    trace = traces["generation"]
    summary = summarize(trace)
    ops = trace.ops(0)
    ops = ops[
        ops["iteration"].isin(range(summary.warmup_iterations, summary.iterations))
    ]
    sums = (ops["end_ns"] - ops["start_ns"]).groupby(ops["iteration"]).sum() / 1e6
    expected = sums.reindex(range(summary.iterations), fill_value=0.0).median()
    assert summary.without_gradients_ms == pytest.approx(expected)
    assert summary.as_json()["without_gradients_ms"] == summary.without_gradients_ms
    assert [
        line
        for line in summary_view(trace, summary)
        if isinstance(line, str) and line.startswith("of other: ")
    ]
    steps = sub_steps(trace)
    assert [(step.name, step.phase, step.resource) for step in steps.steps] == [
        (NAME, "other", "host")
    ]
    tables = [part for part in steps_view(trace, steps) if isinstance(part, Table)]
    assert "They follow each other" in str(tables[0].note)
    assert summarize(traces["another thread"]).without_gradients_ms is None


class _Step(torch.nn.Module):
    def __init__(self, then: object = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.then is not None:
            raise self.then  # type: ignore[misc]
        return self.linear(x)


def test_forwards_without_gradients__may_raise(tmp_path: Path) -> None:
    model, broken = _Step(), _Step(KeyError("of the job"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Tracer(tmp_path / "run.ebb"):
        for _ in range(3):
            with torch.no_grad(), pytest.raises(KeyError, match="of the job"):
                broken(torch.ones(2))
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    trace = open_trace(tmp_path / "run.ebb")
    assert len(trace.ops(0)) == 2
    assert not [note for note in trace.notes if "fault" in note]
