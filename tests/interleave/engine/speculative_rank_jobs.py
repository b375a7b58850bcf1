"""Jobs for two ranks whose updates run inside the backward; each returns the result of
rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import speculate
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy, make_plan, policy
from ebbtide.machines.machine import Machine
from tests.interleave.engine.late_rank_jobs import late_optimizer, on_all_ranks, train
from tests.interleave.engine.rank_jobs import Result, sharded


def speculative_shards(rank: int, folder: Path) -> Result:
    """Return whether speculative updates change nothing, by whether all steps are
    clipped, and overlap."""

    @policy("speculating", overlap=("backward", "both"))
    def speculating(workload: Workload, machine: Machine, chosen: Policy) -> Plan:
        """Speculate all subgroups."""
        plan = speculate(
            make_plan("pipelined", workload, machine),
            workload,
            100,
            uploads_first=False,
        )
        assert plan.speculated
        return (
            late(plan, workload) if chosen.options["overlap"] == "both" else plan
        ).validate(workload)

    results: Result = {}
    for name, max_grad_norm in (("clipped", 0.3), ("not clipped", 1e6)):
        model = sharded()
        with late_optimizer(
            model, "streamed", "none", max_grad_norm=max_grad_norm
        ) as optimizer:
            expected = train(model, optimizer, rank)
        for overlap in ("backward", "both"):
            model = sharded()
            with late_optimizer(
                model, "streamed", overlap, "speculating", max_grad_norm
            ) as optimizer:
                results[f"{name}, {overlap}"] = on_all_ranks(
                    train(model, optimizer, rank) == expected
                )
    return results


JOBS: tuple[Callable[[int, Path], Result], ...] = (speculative_shards,)
