"""Tests commits of state in storage, and what goes on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.interleave.engine.interleaved_adamw import InterleavedAdamW
from tests.features.storage.test_optimizer import ALL, SMALL, storing_optimizer
from tests.interleave.engine.training import Job, ReferenceOptimizer


def _states(optimizer: InterleavedAdamW) -> list[torch.Tensor]:
    entries = optimizer.state_dict()["state"].values()
    return [value for entry in entries for value in entry.values()]


@pytest.mark.parametrize("rule", ["adamw", "adamw-remainder"])
def test_commit__has_what_the_job_has_changed_since_the_last_step(
    tmp_path: Path, rule: str
) -> None:
    job, again = Job(torch.bfloat16), Job(torch.bfloat16)
    with storing_optimizer(job, [tmp_path], rule=rule) as optimizer:
        for step in range(3):
            job.step(optimizer, step)
        # Writes to storage may still run.
        optimizer.synchronize()
        with torch.no_grad():
            job.net.last.weight.mul_(1.01)
        commit, values = (
            optimizer.commit(),
            [param.detach().clone() for param in job.net.parameters()],
        )
        job.losses.clear()
        for step in range(3, 6):
            job.step(optimizer, step)
        expected = job.outcome()
    for _ in range(3):
        next(again._batches)
    with storing_optimizer(again, [tmp_path], rule=rule) as other:
        for param, value in zip(again.net.parameters(), values, strict=True):
            param.data.copy_(value)
        other.load_state_dict(commit)
        for step in range(3, 6):
            again.step(other, step)
        assert again.outcome() == expected


@pytest.mark.parametrize("budget", [SMALL, ALL])
def test_commit__is_what_another_optimizer_goes_on_from(
    tmp_path: Path, budget: float
) -> None:
    job, same = Job(), Job()
    expected = ReferenceOptimizer(same.net.parameters())
    folders = [tmp_path / "a", tmp_path / "b"]
    with storing_optimizer(job, folders, budget=budget) as optimizer:
        for step in range(3):
            job.step(optimizer, step)
            same.step(expected, step)
        commit = optimizer.commit()
        values = [param.detach().clone() for param in job.net.parameters()]
        losses, states = list(job.losses), _states(optimizer)
        for step in range(3, 6):
            job.step(optimizer, step)
    # What a saved file has.
    torch.save(commit, tmp_path / "commit.pt")
    commit = torch.load(tmp_path / "commit.pt", weights_only=True)
    resumed = Job()
    for _ in range(3):
        next(resumed._batches)
    with torch.no_grad():
        for param, value in zip(resumed.net.parameters(), values, strict=True):
            param.copy_(value)
    with storing_optimizer(resumed, folders, budget=budget) as optimizer:
        optimizer.load_state_dict(commit)
        assert all(
            torch.equal(a, b) for a, b in zip(states, _states(optimizer), strict=True)
        )
        for step in range(3, 6):
            resumed.step(optimizer, step)
            same.step(expected, step)
        assert [param.tolist() for param in resumed.net.parameters()] == [
            p.tolist() for p in same.net.parameters()
        ]
    assert losses + resumed.losses == same.losses
