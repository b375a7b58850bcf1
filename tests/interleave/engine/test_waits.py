"""The engine adds no wait that the plan lacks: every wait of real runs of random plans
is in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import FUZZ, examples
from tests.interleave.engine.test_ranks import run_ranks
from tests.interleave.engine.training import Job
from tests.interleave.engine.waits import (
    JOBS,
    random_optimizer,
    random_policy,
    recorded_waits,
)

_STEPS = 4
_KINDS = (
    "an operation",
    "its gradient",
    "the factors of the step",
    "the first gradient",
    "device memory",
)
_PLANS = (
    "with storage",
    "that speculate with storage",
    "with late updates",
    "with parked state",
)


def test_engine__waits_for_nothing_that_the_plan_lacks(tmp_path: Path) -> None:
    seeds = range(examples(300 // FUZZ, by_default=30))
    with random_policy(), recorded_waits() as waits:
        for seed in seeds:
            job = Job(torch.bfloat16)
            with random_optimizer(job.net, seed, tmp_path / str(seed)) as optimizer:
                for step in range(_STEPS):
                    job.step(optimizer, step)
                optimizer.synchronize()
    assert not waits.unplanned
    # Otherwise the runs would show nothing.
    assert all(
        waits.counts[kind]
        for kind in (*_KINDS, *(f"plans {plans}" for plans in _PLANS))
    ), waits.counts


@pytest.mark.slow
def test_engine__waits_for_nothing_that_the_plan_lacks_on_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path, JOBS)
    result: dict[str, Any] = torch.load(tmp_path / "results", weights_only=False)[
        JOBS[0].__name__
    ]
    assert not result["unplanned"]
    assert result["counts"]["the factors of the step"]
