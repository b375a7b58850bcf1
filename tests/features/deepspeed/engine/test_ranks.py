"""Two ranks, whose parts of the parameters end with padding."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import slow

from .conftest import ResultsOfRanks
from .test_storage import storing
from .training import config, digest, engine, train

# The policies, the one that saves a checkpoint first.
FEW = ("twin-flow:0.5", "pipelined,overlap=forward")
POLICIES = {"few": FEW, "all": (*FEW, "zero-offload", "adaptive")}


def job(folder: Path, which: str) -> dict[str, Any]:
    """Run the job of a rank: the policies one after the other, and a checkpoint of the
    first that another loads."""
    policies = POLICIES[which]
    results: dict[str, Any] = {}
    for policy in policies:
        with engine(policy, config("bf16", 2)) as running:
            results[policy] = train(running, 3), digest(running)
            if policy == policies[0]:
                running.save_checkpoint(folder, tag="three")
                results["further"] = train(running, 2, seed=5), digest(running)
    with storing(
        [folder / "storage"], "pipelined", config("bf16", 2), host_memory_budget=160e3
    ) as running:
        results["storage"] = train(running, 3), digest(running)
        commit = running.optimizer.commit()
        assert running.optimizer._runner.plan.stored
    with storing(
        [folder / "storage"],
        "pipelined",
        config("bf16", 2),
        host_memory_budget=160e3,
        seed=4,
    ) as running:
        running.optimizer.load_commit(commit)
        results["committed"] = results["storage"][0], digest(running)
    with engine("interleaved:2", config("bf16", 2), seed=4) as running:
        running.load_checkpoint(folder, tag="three")
        results["loaded"] = train(running, 2, seed=5), digest(running)
    with engine(None, config("bf16", 2)) as running:
        results["plain"] = train(running, 3), ""
    return results


@pytest.mark.parametrize("which", slow(POLICIES, but=("few",)))
def test_ranks__two_ranks_give_the_same_bits_under_every_policy(
    which: str, results_of_ranks: ResultsOfRanks
) -> None:
    policies, ranks = POLICIES[which], results_of_ranks(f"policies {which}")
    for results in ranks:
        names = (*policies, "storage", "committed")
        assert (
            len(
                {
                    hashlib.sha256(str(results[name]).encode()).hexdigest()
                    for name in names
                }
            )
            == 1
        )
        assert results["loaded"] == results["further"]
        assert results["plain"][0] == pytest.approx(results[policies[0]][0], abs=2e-3)
    assert ranks[0][policies[0]] != ranks[1][policies[0]]
