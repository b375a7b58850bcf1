"""Tests of the comparison with other policies."""

from __future__ import annotations

from hypothesis import given

from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import BUILT_IN
from ebbtide.interleave.policies.search.best_plan import rank_others
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from ebbtide.machines.machine import Machine
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even, ran
from tests.interleave.strategies import machines, workloads


@given(workloads(max_subgroups=6), machines())
def test_rank_others__finds_the_best_of_all(
    workload: Workload, machine: Machine
) -> None:
    others = rank_others(PlanCosts(workload, machine, "adaptive", 10**6), "adaptive")
    best_s = min(
        schedule.iteration_s
        for schedule in (ran(policy, workload, machine) for policy in others)
        if schedule.fits_device(None)
    )
    policy = min(others, key=others.__getitem__)
    assert others[policy] == best_s
    assert ran(policy, workload, machine).iteration_s == best_s


def test_rank_others__has_every_built_in_policy() -> None:
    workload = even(4, gpu_free=((0.0, 1e12),))
    others = rank_others(
        PlanCosts(workload, TEST_MACHINE, "adaptive", 10**6), "adaptive"
    )
    assert {*map(str, others)} >= set(BUILT_IN) - {"adaptive"}


def test_rank_others__leaves_out_what_cannot_fit() -> None:
    workload = even(4, gpu_free=((0.0, 1e9),))
    others = rank_others(
        PlanCosts(workload, TEST_MACHINE, "adaptive", 10**6), "adaptive"
    )
    assert "gpu-only" not in map(str, others)
    assert min(others.values()) < INFINITE
