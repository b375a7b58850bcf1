"""Tests of the search over placements."""

from dataclasses import replace

from ebbtide.interleave.model.operations import Overlap
from ebbtide.interleave.policies.search.placement_search import Placement, PlacementSearch
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from tests.interleave.simulation.test_simulator import TEST_MACHINE, even


def test_with_fewer_moved__leads_to_a_placement_that_fits() -> None:
    """Gradients of moved subgroups wait on the device: with 24 there are too many at once, with 15 not."""
    workload = replace(even(24, 10**8, gpu_free=((0.0, 4e9),), clipping=False), backward_s=0.5)
    search = PlacementSearch(PlanCosts(workload, TEST_MACHINE, "test", 10**6), range(24))
    start = Placement(0, moved=24, slots=2, late=2, interleave_cpu_gpu=False)
    assert search.cost(start) == search.cost(start._replace(moved=18)) == INFINITE
    assert search.with_fewer_moved(start) == start._replace(moved=15)
    assert search.cost(start._replace(moved=15)) < INFINITE


def test_improve__finds_fewer_threads_where_nothing_is_moved() -> None:
    """Updates under the backward slow the copies of gradients to the host."""
    workload = replace(even(8, 10**8, gpu_free=((0.0, 0.0),)), backward_s=0.5)
    machine = replace(TEST_MACHINE, host_memory_bytes_per_s=20e9)
    search = PlacementSearch(
        PlanCosts(workload, machine, "test", 10**6, Overlap(forward=True, backward=True)), range(8)
    )
    start = Placement(0, moved=0, slots=0, speculated=8)
    best = search.improve(start)
    assert best.cpu_share < 1
    assert search.cost(best) < 0.97 * search.cost(start)
