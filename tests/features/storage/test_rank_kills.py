"""Two ranks of which one is killed at any moment: both go on from the last commit that
both have."""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.interleave.engine.training import Job, ReferenceOptimizer

from .test_optimizer import storing_optimizer

RANKS = 2


@pytest.mark.parametrize(
    ("steps", "kills", "overlap"),
    [
        (12, 3, "forward"),
        pytest.param(60, 40, "none", marks=pytest.mark.slow),
        pytest.param(60, 40, "forward", marks=pytest.mark.slow),
    ],
)
def test_commit__ranks_go_on_from_the_last_one_that_all_have(
    tmp_path: Path, steps: int, kills: int, overlap: str
) -> None:
    same, draw, warm = Job(), random.Random(0), Job()
    with storing_optimizer(
        warm, [tmp_path / "warm"], mode="kept", overlap=overlap
    ) as optimizer:
        # Compiles the kernels for all processes.
        warm.step(optimizer)
    expected = ReferenceOptimizer(same.net.parameters())
    for step in range(steps):
        same.step(expected, step, backwards=RANKS)
    # The first: rank 0 commits and saves, and rank 1 is killed just before its commit.
    assert _run(tmp_path, 0, steps, overlap, [None, "before its commit"]) != [0, 0]
    assert [_saved_steps(tmp_path, rank)[-1] for rank in range(RANKS)] == [4, 2]
    for number in range(1, kills):
        kill = draw.choice(
            ["before its commit", "after its commit", *3 * [draw.uniform(0.0, 0.3)]]
        )
        _run(tmp_path, number, steps, overlap, draw.sample([None, kill], 2))
    assert _run(tmp_path, kills, steps, overlap, [None, None]) == [0, 0]
    for rank in range(RANKS):
        saved = torch.load(_checkpoint(tmp_path, rank, steps), weights_only=True)
        assert all(
            torch.equal(a, b)
            for a, b in zip(saved["values"], same.net.parameters(), strict=True)
        )


def _run(
    folder: Path,
    number: int,
    steps: int,
    overlap: str,
    kills: Sequence[str | float | None],
) -> list[int]:
    """Run both ranks to the end, or until one is killed; return how they ended."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            _run_rank(
                rank,
                folder,
                folder / f"rendezvous-{number}",
                steps,
                overlap,
                kills[rank],
            )
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def _run_rank(
    rank: int,
    folder: Path,
    rendezvous: Path,
    steps: int,
    overlap: str,
    kill: str | float | None,
) -> None:
    """Run a rank, which is killed at a place in its fourth step, or after so many
    seconds, if it does not end before.

    If the other rank is killed, its next gradient never arrives, and this one ends with
    an error.
    """
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
        store = dist.FileStore(str(rendezvous), RANKS)
        # Not the default group: the process that was forked may have one, of tests of
        # DeepSpeed.
        ranks = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=60))
        _train(ranks, rank, folder, steps, overlap, kill)
        code = 0
    except RuntimeError as error:
        if "pair.cc" not in str(error):
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _train(
    ranks: Any,
    rank: int,
    folder: Path,
    steps: int,
    overlap: str,
    kill: str | float | None,
) -> None:
    job = Job()
    with storing_optimizer(
        job, [folder / "storage"], mode="kept", overlap=overlap
    ) as optimizer:
        common, least = torch.zeros(steps + 1), dist.AllreduceOptions()
        common[[0, *_saved_steps(folder, rank)]] = 1
        least.reduceOp = dist.ReduceOp.MIN
        ranks.allreduce([common], least).wait()
        first = int(common.nonzero().max())
        for given_up in _saved_steps(folder, rank):
            if given_up > first:
                _checkpoint(folder, rank, given_up).unlink()
        if first:
            saved = torch.load(_checkpoint(folder, rank, first), weights_only=True)
            with torch.no_grad():
                for param, value in zip(
                    job.net.parameters(), saved["values"], strict=True
                ):
                    param.copy_(value)
            optimizer.load_state_dict(saved["commit"])
        if isinstance(kill, float):
            threading.Timer(kill, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(RANKS * first + rank):
            next(job._batches)
        for step in range(first, steps):
            job.net.zero_grad()
            job.loss(step).backward()
            next(job._batches)
            for param in job.net.parameters():
                if param.grad is not None:
                    ranks.allreduce([param.grad]).wait()
            optimizer.step()
            if step % 2:
                _kill_if(kill == "before its commit" and step == first + 3)
                commit = optimizer.commit()
                _kill_if(kill == "after its commit" and step == first + 3)
                _save(folder, rank, step + 1, job, commit)


def _kill_if(is_due: bool) -> None:
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)


def _save(folder: Path, rank: int, step: int, job: Job, commit: dict[str, Any]) -> None:
    """Save a checkpoint and keep the one before it, which another rank may have to go
    on from."""
    values = [param.detach().clone() for param in job.net.parameters()]
    new = folder / f"new-{rank}"
    torch.save({"values": values, "commit": commit}, new)
    new.replace(_checkpoint(folder, rank, step))
    for old in _saved_steps(folder, rank)[:-2]:
        _checkpoint(folder, rank, old).unlink()


def _checkpoint(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank-{rank}-step-{step}.pt"


def _saved_steps(folder: Path, rank: int) -> list[int]:
    """Return the steps after which a rank has saved a checkpoint, in order."""
    return sorted(
        int(path.stem.rpartition("-")[2])
        for path in folder.glob(f"rank-{rank}-step-*.pt")
    )
