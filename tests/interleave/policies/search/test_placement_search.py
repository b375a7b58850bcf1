"""Tests of the search over placements."""

from dataclasses import replace

from ebbtide.interleave.model.operations import Overlap
from ebbtide.interleave.policies.search.placement_search import (
    Placement,
    PlacementSearch,
)
from ebbtide.interleave.policies.search.plan_costs import PlanCosts
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even


def test_descend__finds_fewer_threads_where_nothing_is_moved() -> None:
    """Updates under the backward slow the copies of gradients to the host."""
    workload = replace(even(8, 10**8, gpu_free=((0.0, 0.0),)), backward_s=0.5)
    machine = replace(TEST_MACHINE, host_memory_bytes_per_s=20e9)
    search = PlacementSearch(
        PlanCosts(
            workload, machine, "test", 10**6, Overlap(forward=True, backward=True)
        ),
        range(8),
        target_s=0.0,
    )
    start = Placement(0, moved=0, slots=0, speculated=8)
    best = search.descend(start, 1)
    assert best.cpu_share < 1
    assert search.cost(best) < 0.97 * search.cost(start)


def test_race__ends_at_the_target() -> None:
    workload = even(16, 10**8, gpu_free=((0.0, 4e9),))

    def race(target_s: float) -> tuple[float, int]:
        costs = PlanCosts(workload, TEST_MACHINE, "test", 10**6)
        search = PlacementSearch(costs, range(16), target_s)
        best = search.race([Placement(0, 4, 2), Placement(2, 2, 1)], 4)[0]
        return search.cost(best), costs.ops_left

    best, ops_left = race(0.0)
    near, more_left = race(2 * best)
    assert best < near <= 2 * best
    assert more_left > ops_left
