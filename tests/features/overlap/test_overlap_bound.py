"""Tests of the bound where updates may run beside the step: closed forms, and that no
plan is below it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.interleave.model.operations import OVERLAPS
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.bound import Bound, bound
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.machine import Machine
from tests.conftest import examples, slow
from tests.interleave.policies.exhaustive import Exhaustive
from tests.interleave.policies.small_cases import KINDS, small_case
from tests.interleave.simulation.test_simulator import (
    OVERHEAD,
    TEST_MACHINE,
    UP,
    C,
    even,
)
from tests.interleave.strategies import machines, workloads

N = 20 * 10**8
FORWARD = OVERLAPS["forward"]
# Relative and absolute tolerance of the solver.
RELATIVE, ABSOLUTE = 1e-5, 1e-9


def on_the_cpu(forward_s: float, **values: float) -> tuple[Workload, Bound]:
    """Return a workload without free device memory, and its bound with updates in the
    next forward."""
    workload = even(
        20, forward_s=forward_s, backward_s=20.0, gpu_free=((0.0, 0.0),), **values
    )
    return workload, bound(workload, TEST_MACHINE, FORWARD)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_bound__of_late_updates_is_what_the_forward_does_not_hide(share: float) -> None:
    """The CPU alone needs N / C seconds; a shorter forward hides its own length of
    them."""
    _, bounds = on_the_cpu(share * N / C)
    assert bounds.exposed_s == pytest.approx(OVERHEAD + (1 - share) * N / C)
    # With whole subgroups the last one is new before the forward uses it, at 19/20 of
    # its length.
    last_used_s = share * N / C * 19 / 20
    assert bounds.exposed_whole_s >= OVERHEAD + N / C - last_used_s - RELATIVE


def test_bound__of_late_updates_waits_for_the_first_subgroup() -> None:
    """A forward that is longer than all updates hides all but the first subgroup's."""
    _, bounds = on_the_cpu(10 * N / C)
    assert bounds.exposed_s == pytest.approx(OVERHEAD, abs=1e-6)
    assert bounds.exposed_whole_s >= OVERHEAD + N / 20 / C - RELATIVE


def test_bound__of_late_updates_hides_uploads_behind_other() -> None:
    """Nothing needs the parameters in a long `other`: only the overhead is left."""
    _, bounds = on_the_cpu(0.0, other_s=2 * (N / C + 2 * N / UP))
    assert bounds.exposed_whole_s == pytest.approx(OVERHEAD, rel=1e-3)


def test_bound__counts_late_updates_on_the_gpu_in_full() -> None:
    """Compute stands still meanwhile: with a slow GPU and no CPU to speak of, none of
    its time is hidden."""
    workload = even(20, forward_s=100.0, backward_s=20.0, gpu_free=((0.0, 1e12),))
    machine = replace(
        TEST_MACHINE, cpu_update_params_per_s=1.0, gpu_update_params_per_s=1e9
    )
    assert bound(workload, machine, FORWARD).exposed_s == pytest.approx(
        OVERHEAD + N / 1e9
    )


late_policies = st.sampled_from(
    ["pipelined", "interleaved:1", "interleaved:2", "interleaved:3@0.5"]
)


@given(late_policies, workloads(), machines())
def test_bound__of_late_updates_is_never_above_a_policy(
    policy: str, workload: Workload, machine: Machine
) -> None:
    schedule = simulate(
        make_plan(f"{policy},overlap=forward", workload, machine), workload, machine
    )
    if schedule.fits_device(None):
        assert_not_below(schedule.exposed_s, bound(workload, machine, FORWARD))


@pytest.mark.parametrize("kind", slow(KINDS, but=("windows not clipped",)))
def test_bound__of_late_updates_is_never_above_the_best_of_all_plans(kind: str) -> None:
    for seed in range(examples(3, by_default=1)):
        workload, machine = small_case(kind, seed)
        best_s = Exhaustive(workload, machine, 300, FORWARD).least_exposed_s()
        assert_not_below(best_s, bound(workload, machine, FORWARD))


def assert_not_below(exposed_s: float, bounds: Bound) -> None:
    assert exposed_s >= bounds.exposed_whole_s * (1 - RELATIVE) - ABSOLUTE
    assert exposed_s >= bounds.exposed_s * (1 - RELATIVE) - ABSOLUTE
