"""Searches for a batch size: jobs that catch a shortage of memory and go on with less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.features.dryrun.forked import run_forked
from tests.features.dryrun.test_session import dry_run

CAPACITY_BYTES = 4 * 2**30
WIDTH, FIRST = 1024, 2**20
ROW_BYTES = 4 * WIDTH


def train(batch: int) -> None:
    """Train on batches of so many rows."""
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.randn(batch, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_class() -> None:
    """Halve the batch in a handler in the loop."""
    batch = FIRST
    while True:
        try:
            train(batch)
        except torch.OutOfMemoryError:
            batch //= 2


def by_text() -> None:
    """Halve the batch in a function that a loop calls."""

    def has_room(batch: int) -> bool:
        try:
            train(batch)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return False
        return True

    batch = FIRST
    while not has_room(batch):
        batch //= 2


def by_report() -> None:
    """Say that memory is short, and end."""
    try:
        train(FIRST)
    except torch.OutOfMemoryError:
        raise AssertionError("choose a smaller batch") from None


def by_skips() -> None:
    """Leave out each batch that does not fit."""
    while True:
        try:
            train(FIRST)
        except torch.OutOfMemoryError:
            continue


def measure(job: Callable[[], None]) -> tuple[int, int, Any]:
    """Return the peak of reserved memory of a dry run, and how often memory was
    short."""

    def run() -> Any:
        run, _ = dry_run(job, capacity_bytes=CAPACITY_BYTES)
        assert run.finished
        return run.memory.most_reserved_bytes, run.memory.failures, run.notes()

    return run_forked(run)  # type: ignore[no-any-return]


@pytest.mark.parametrize("job", [by_class, by_text])
def test_search__ends_with_a_batch_that_fits(job: Callable[[], None]) -> None:
    reserved, failures, notes = measure(job)
    # Inputs and outputs of 2**18 rows fit.
    assert failures == 2
    assert 2 * ROW_BYTES * 2**18 <= reserved <= CAPACITY_BYTES
    assert any("memory ran out 2 times" in note for note in notes)


@pytest.mark.parametrize(("job", "most"), [(by_report, 0), (by_skips, 64)])
def test_job_that_does_not_search__goes_on(job: Callable[[], None], most: int) -> None:
    reserved, failures, _ = measure(job)
    assert failures == most
    assert reserved > ROW_BYTES * FIRST
