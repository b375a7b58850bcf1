"""The check of plans of features, with a wait less, against runs on symbols: storage,
overlap, layers and systems."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.features.layers.model import place
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.machines.machine import Machine
from tests.conftest import examples
from tests.features.layers.systems.test_streamed_weights import MACHINE
from tests.features.layers.test_policy import _random_workload
from tests.features.storage.test_policy import JOB
from tests.features.systems.test_storage_systems import FULL, INFINITY
from tests.features.systems.test_systems import SYSTEMS
from tests.interleave.model.symbolic_runs import (
    SymbolicRuns,
    assert_refused_where_results_are_wrong,
    is_refused,
    with_one_wait_less,
)
from tests.interleave.simulation.stored_plans import cases
from tests.interleave.strategies import machines, workloads

SEEDS = st.integers(0, 2**32)


@given(
    cases(max_subgroups=5, again=False)
    | cases(max_subgroups=5, stored=False, again=False),
    SEEDS,
)
@settings(max_examples=examples(300, by_default=20))
def test_validate__refuses_a_plan_with_overlap_or_storage_and_a_wait_less_where_results_may_be_wrong(
    case: tuple[Plan, Workload, Machine], seed: int
) -> None:
    plan, workload, _ = case
    assert_refused_where_results_are_wrong(plan, workload, random.Random(seed), 4)


@given(st.sampled_from(SYSTEMS), workloads(max_subgroups=4), machines(), SEEDS)
@settings(max_examples=examples(200, by_default=20))
def test_validate__refuses_a_plan_of_a_system_with_a_wait_less_where_results_may_be_wrong(
    policy: str, workload: Workload, machine: Machine, seed: int
) -> None:
    plan = make_plan(policy, workload, machine)
    assert_refused_where_results_are_wrong(plan, workload, random.Random(seed), 4)


@pytest.mark.parametrize("policy", INFINITY)
def test_validate__refuses_a_plan_on_storage_with_a_wait_less_where_results_may_be_wrong(
    policy: str,
) -> None:
    job = replace(JOB, params=4 * 10**8)
    assert_refused_where_results_are_wrong(
        make_plan(policy, job, FULL), job, random.Random(0), 12
    )


@pytest.mark.parametrize(
    "policy",
    [
        "gpu-only,weights=streamed,activations=offload",
        "pipelined,weights=streamed,activations=offload",
        "megatrain",
        "roundpipe",
        "adaptive,weights=streamed,activations=offload",
        "zero3-offload-params,activations=recompute",
        "ml-dataflow",
    ],
)
@pytest.mark.parametrize("clipping", [False, True])
def test_validate__refuses_a_plan_for_layers_with_a_wait_less_where_results_may_be_wrong(
    policy: str, clipping: bool
) -> None:
    """Compute keeps the order of rounds of activations, since it waits for them."""
    draw = random.Random(policy)
    workload = replace(_random_workload(draw), clipping=clipping)
    if policy == "ml-dataflow":
        workload = replace(
            workload, sizes=tuple(layer.params for layer in workload.layers)
        )
    elif policy == "megatrain":
        workload = replace(workload, chunk_shares=(1.0,))
    plan = make_plan(policy, workload, MACHINE)
    placed = place(workload, plan.layers)
    assert next(SymbolicRuns(plan, placed, compute_waits=True).problems(), None) is None
    refused = 0
    for name, changed in with_one_wait_less(plan, draw, 12):
        problem = next(
            SymbolicRuns(changed, placed, compute_waits=True).problems(), None
        )
        refused += is_refused(changed, placed)
        assert problem is None or is_refused(changed, placed), (name, problem)
    assert refused
