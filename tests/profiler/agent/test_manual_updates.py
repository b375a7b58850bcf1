"""Loops without an optimizer of torch: iterations are cut where a forward follows a
backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.profiler.agent import spool as kinds
from ebbtide.profiler.agent.iteration_rule import UnsteppedIterations
from ebbtide.profiler.recording.spools.records import RECORD, iteration_ends
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.iterations import explain_no_iterations
from tests.conftest import Recorded, phases_of
from tests.profiler.agent.jobs import PRELUDE, STEPS

Record = Callable[..., Recorded]

MANUAL = """
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data -= 1e-2 * p.grad
            p.grad = None
"""
OWN_OPTIMIZER = """
class Muon:
    def step(self):
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-2 * p.grad.sign()
                p.grad = None
optimizer = Muon()
for _ in range(STEPS):
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""
ACCUMULATION = """
for _ in range(STEPS):
    for _ in range(3):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WARNING = 'mark them with Tracer(...).phase("update")'


# Recorded by the fixture `traced`.
MANUAL_UPDATES = {
    "manual": MANUAL,
    "own optimizer": OWN_OPTIMIZER,
    "torch": ACCUMULATION,
}


def test_tracer__cuts_iterations_without_an_optimizer(traced: dict[str, Trace]) -> None:
    for name in ("manual", "own optimizer"):
        assert phases_of(traced[name]) == [["forward", "backward"]] * STEPS
        assert [note for note in traced[name].notes if WARNING in note]
    assert (
        phases_of(traced["torch"]) == [["forward", "backward"] * 3 + ["update"]] * STEPS
    )
    assert not traced["torch"].notes


@pytest.mark.slow
def test_profile__warns_once_and_gives_no_time_of_updates(record: Record) -> None:
    recorded = record(PRELUDE + MANUAL)
    assert recorded.run.stderr.count(WARNING) == 1
    times = compare_iterations(recorded.trace).to_pandas()
    assert len(times) == STEPS
    assert times["update_ms"].isna().all()


def records(
    phases: str, iteration_after: int | None = None, first: int = 0
) -> np.ndarray:
    """Return the records of a spool with phases written as F, B and U, and an iteration
    that ends after one of them; the ends of the others are the recorder's."""
    rows = []
    if first:
        rows.append({"kind": kinds.START, "a": first})
    unstepped = UnsteppedIterations()
    unstepped.number = first
    for number, word in enumerate(phases.split(), 1):
        phase = "FBU".index(word)
        rows.append({"kind": kinds.PHASE, "code": phase, "a": number})
        if (news := unstepped.add(phase, number)) is not None:
            row = zip(("code", "a", "b"), news, strict=True)
            rows.append({"kind": kinds.ITERATION, **dict(row)})
        if number == iteration_after:
            rows.append({"kind": kinds.ITERATION, "a": 0, "b": number})
    table = np.zeros(len(rows), RECORD)
    for row, values in zip(table, rows, strict=True):
        for key, value in values.items():
            row[key] = value
    return table


@pytest.mark.parametrize(
    ("phases", "ends"),
    [
        ("F B F B F B", {0: 2, 1: 4, 2: 6}),
        ("F F B B F B F", {0: 4, 1: 6}),
        ("F F F", {}),
        ("B B", {}),  # perhaps an iteration whose update was not reached
        ("F B U F B U", {0: 3, 1: 5}),
        ("", {}),
    ],
)
def test_iteration_ends__are_where_a_forward_follows_a_backward(
    phases: str, ends: dict[int, int]
) -> None:
    assert iteration_ends(records(phases)) == ends
    assert iteration_ends(records(phases, first=7)) == {
        7 + number: end for number, end in ends.items()
    }


def test_iteration_ends__follow_optimizers_where_any_stepped() -> None:
    assert iteration_ends(records("F B F B U F B", iteration_after=5)) == {0: 5}


def test_explain_no_iterations__names_the_remedy() -> None:
    assert "nothing ran backward" in explain_no_iterations(["forward"], ["cut off"])
    assert "Tracer(...).phase(" in explain_no_iterations([], [None])


def test_explain_no_iterations__names_a_process_that_left_its_recording() -> None:
    for stopped in ("cut off", "exec"):
        assert "last second was lost" in explain_no_iterations([], [stopped, None])
