"""Cycles without marks: what repeats makes some, what only looks like it makes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.features.cycles.cycles import find_cycles, slowest_cycles
from ebbtide.profiler.trace import open_trace
from tests.features.cycles.jobs import Job

TRACES = sorted(Path("traces").resolve().glob("*.ebb"))


@pytest.mark.parametrize("updates", [2, 4, 64])
def test_repetition__of_rollouts_and_updates_is_a_cycle(updates: int) -> None:
    job = Job()
    for _ in range(5):
        job.forwards(300)
        job.train(updates)
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    # The gap before the first phase is no whole one.
    assert (cycles.source, cycles.count, cycles.warmup) == ("repetition", 4, 1)
    assert cycles.iterations == updates
    names = [part.name for part in cycles.parts]
    assert names == ["forwards without gradients", f"{updates} updates"]
    rollout, training = cycles.parts
    assert rollout.median_ms == pytest.approx(300 * 1.2 + 0.1)
    assert training.median_ms == pytest.approx(updates * 15.1 - 0.1)
    assert rollout.share + training.share == pytest.approx(1)


def test_repetition__of_one_update_needs_a_generation() -> None:
    for forwards, has_cycles in ((8, True), (7, False)):
        job = Job()
        for _ in range(12):
            job.forwards(forwards)
            job.train()
        assert (find_cycles(job.trace(), 0) is not None) == has_cycles


def test_repetition__of_more_updates_in_some_iterations_is_a_cycle() -> None:
    job = Job()
    for _ in range(6):
        job.train(4)
        job.train(1, updates=2)
    cycles = find_cycles(job.trace(), 0)
    assert cycles is not None
    assert (cycles.count, cycles.iterations) == (6, 5)
    names = [part.name for part in cycles.parts]
    assert names == ["4 iterations of 1 update", "an iteration of 2 updates"]


def irregular(job: Job) -> None:
    for updates in (3, 5, 2, 7, 4, 6):
        job.forwards(50)
        job.train(updates)


def reference_model(job: Job) -> None:
    for _ in range(20):
        job.forwards(1, ms=10)
        job.train()


def evaluation_of_an_epoch(job: Job) -> None:
    for _ in range(4):
        job.train(100)
        job.forwards(2000)
    job.train(100)


def checkpoints(job: Job) -> None:
    for _ in range(8):
        job.train(4)
        job.wait(500)


def slow_loader_with_a_probe(job: Job) -> None:
    """The gaps are long, and forwards are a moment of them."""
    for _ in range(8):
        job.wait(300)
        job.forwards(1)
        job.train(4)


def two_rollouts(job: Job) -> None:
    for _ in range(2):
        job.forwards(50)
        job.train(4)


@pytest.mark.parametrize(
    "fill",
    [
        irregular,
        reference_model,
        evaluation_of_an_epoch,
        checkpoints,
        slow_loader_with_a_probe,
        two_rollouts,
        lambda job: job.train(40),
        lambda job: job.train(40, updates=3),
        lambda job: job.train(0),
    ],
)
def test_repetition__makes_no_cycle_of_other_jobs(fill: object) -> None:
    job = Job()
    fill(job)  # type: ignore[operator]
    assert find_cycles(job.trace(), 0) is None


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_traces__have_no_cycles(path: Path) -> None:
    assert slowest_cycles(open_trace(path)) is None
