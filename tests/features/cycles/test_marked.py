"""Cycles by names: marks, and ranges of imported traces."""

from __future__ import annotations

import pytest

from ebbtide.features.cycles.cycles import find_cycles
from tests.features.cycles.jobs import Job


def marked(job: Job, cycles: int, table: str = "marks", names: str = "RSU") -> None:
    """Run cycles of a rollout, a score and 3 updates, each with its first name."""
    rollout, score, update = names
    for cycle in range(cycles):
        start = job.at
        job.wait(50)
        job.mark(rollout, start, table)
        start = job.at
        job.wait(10)
        job.mark(score, start, table)
        for _ in range(3):
            start = job.at
            job.train()
            job.mark(update, start, table)
        if cycle % 4 == 1 and table == "marks":
            start = job.at
            job.wait(7)
            job.mark("evaluation", start, table)


def test_marks__are_cut_where_their_first_name_recurs() -> None:
    job = Job()
    marked(job, 9)
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    assert (cycles.source, cycles.count, cycles.iterations) == ("marks", 9, 3)
    parts = {part.name: part for part in cycles.parts}
    assert parts["R"].median_ms == pytest.approx(50, rel=1e-3)
    assert parts["U"].runs == 3
    # It is in two of the eight cycles that count.
    assert parts["evaluation"].median_ms == pytest.approx(7, rel=2e-3)
    assert parts["evaluation"].share < 0.02


def test_marks__without_a_name_for_training_leave_it_to_the_rest() -> None:
    job = Job()
    for _ in range(4):
        start = job.at
        job.wait(50)
        job.mark("rollout", start)
        job.train(3)
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    names = [part.name for part in cycles.parts]
    assert names == ["rollout", "training, not marked"]


def test_marks__of_a_cycle_that_the_recording_cut_are_left_out() -> None:
    job = Job()
    marked(job, 5)
    start = job.at
    job.wait(50)
    job.mark("R", start)
    job.train()
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    assert cycles.count == 5


@pytest.mark.parametrize(
    ("names", "has_cycles"),
    [
        # Names that say nothing, and one iteration in each.
        (("load", "step"), False),
        (("rollout", "step"), True),
    ],
)
def test_ranges__need_a_name_or_several_iterations(
    names: tuple[str, str], has_cycles: bool
) -> None:
    job = Job()
    for number in range(6):
        for name, iterations in zip(names, (0, 1), strict=True):
            start = job.at
            job.train(iterations)
            job.wait(3)
            job.mark(f"{name} {number}", start, "annotations")
    cycles = find_cycles(job.trace(), 0)
    assert (cycles is not None) == has_cycles
    if cycles is not None:
        assert cycles.source == "ranges"


def test_ranges__with_several_iterations_are_cycles() -> None:
    job = Job()
    for _ in range(6):
        for name, iterations in (("a", 0), ("b", 3)):
            start = job.at
            job.train(iterations)
            job.wait(3)
            job.mark(name, start, "annotations")
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    assert (cycles.source, cycles.iterations) == ("ranges", 3)
