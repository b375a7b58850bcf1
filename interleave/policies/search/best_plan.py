"""The best plan that the search finds: its own placements and assignments, compared with all other policies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from ebbtide.interleave.model.overlap import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import parse, plan_in_memory
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.local_search import LocalSearch
from ebbtide.interleave.policies.search.merging import merged_workloads
from ebbtide.interleave.policies.search.minimum_costs import INFINITE
from ebbtide.interleave.policies.search.other_policies import Level, rank_others, worth_comparing
from ebbtide.interleave.policies.search.placement import Placement
from ebbtide.interleave.policies.search.placement_search import PlacementSearch
from ebbtide.interleave.policies.search.plan_costs import PlanCosts
from ebbtide.interleave.policies.storage import with_default_storage
from ebbtide.interleave.simulation.bound import OptimalShares, min_iteration_s, optimal_shares
from ebbtide.interleave.simulation.steps import simulate_steps
from ebbtide.machines.machine import Machine

# More subgroups than these are merged for the search over placements, and not searched one by one.
_MAX_SEARCHED_SUBGROUPS = 40
_MAX_SUBGROUPS_ONE_BY_ONE = 24
# With more subgroups than these, the search is refined with so many before it is with all of them.
_MAX_REFINED_SUBGROUPS = 256
# Work of the search over placements, at each number of subgroups, and of that over assignments (see `PlanCosts`).
_PLACEMENT_OPS = 15_000
_ASSIGNMENT_OPS = 40_000
# How many placements, of how many rankings of the subgroups, the search starts from.
_SEEDS = 3
# Shares of the CPU's update rate that the search starts from once more, where it may slow copies.
_THROTTLED_STARTS = (0.5, 0.25)
# The search ends when the cost is within this factor of the bound.
_NEAR_BOUND = 1.001
# A bound must exceed a plan by this share to rule out that there is a faster one.
_BOUND_TOLERANCE = 1e-6
# How many searches are remembered: replays, recommendations and ablations repeat them.
_REMEMBERED = 16
# Another plan must be shorter than the own one by this share to be preferred.
_LEAST_GAIN = 1e-12


def find_best_plan(workload: Workload, machine: Machine, text: str, *overlaps: Overlap) -> Plan:
    """Return the fastest plan found, with a remark that says what it is.

    It is never slower than the one without overlap.

    Args:
        workload: The workload, whose free device memory must be known.
        machine: The machine. Without its rate of updates on the GPU there are none.
        text: The policy's string.
        *overlaps: Phases that updates may run in, beside none. The first of equally fast plans is returned.

    Raises:
        MachineError: The machine lacks a rate.
    """
    best: Plan | None = None
    best_cost = (True, True, INFINITE)
    # The widest overlap first: its plan is often faster than any plan of the others can be.
    for overlap in reversed(dict.fromkeys((NO_OVERLAP, *overlaps))):
        fits_memory = not (best_cost[0] or best_cost[1])
        if fits_memory and min_iteration_s(workload, machine, overlap) > best_cost[2] * (1 + _BOUND_TOLERANCE):
            continue
        plan = search_plan(workload, machine, parse(text).name, overlap)
        cost = best_cost
        if overlaps:
            stored = with_default_storage(plan, workload, machine)
            cost = simulate_steps(stored, workload, machine).cost(machine)
        if best is None or cost <= best_cost:
            best, best_cost = plan, cost
    assert best is not None
    return replace(best, policy=text)


@lru_cache(maxsize=_REMEMBERED)
def search_plan(workload: Workload, machine: Machine, text: str, overlap: Overlap) -> Plan:
    """Return the fastest plan found with an overlap. The last results are remembered."""
    # From few subgroups to all of them.
    levels = [
        Level(merged, PlanCosts(merged.workload, machine, text, _PLACEMENT_OPS, overlap))
        for merged in merged_workloads(workload, _MAX_SEARCHED_SUBGROUPS, _MAX_REFINED_SUBGROUPS)
    ]
    shares = [optimal_shares(levels[0].merged.workload, machine, whole, overlap) for whole in (False, True)]
    assignments = _search_merged(levels, shares) if len(levels) > 1 else [_search_one_by_one(levels[0].costs, shares)]
    costs = levels[-1].costs
    plan = costs.plan(assignments[-1])
    own_cost = costs.seconds(assignments[-1])
    others = rank_others(levels[0].costs, text)
    remark = _summary(assignments[-1], plan.cpu_share)
    if others and others[0].cost < INFINITE:
        remark += f"; the best of the others was {others[0].text}"
    best, best_cost = replace(plan, remark=remark), own_cost * (1 - _LEAST_GAIN)
    for other_text in worth_comparing(others, levels, assignments):
        other = plan_in_memory(other_text, workload, machine)
        cost = costs.seconds_of_plan(other, best_cost)
        if cost < best_cost:
            best, best_cost = replace(other, policy=text, remark=f"the plan of {other_text}"), cost
    return best


def _search_one_by_one(costs: PlanCosts, shares: list[OptimalShares]) -> Assignment:
    """Return the best assignment for a workload with few subgroups."""
    workload = costs.workload
    starts = []
    for ranking in _rankings(workload):
        search = PlacementSearch(costs, ranking)
        starts += [search.assignment(placement) for placement in _improved_seeds(search, costs, shares)]
    starts = sorted(dict.fromkeys(starts), key=costs.cost)[:_SEEDS]
    is_even = len(set(workload.subgroups[:-1])) <= 1
    if is_even and len(workload.subgroups) > _MAX_SUBGROUPS_ONE_BY_ONE:
        return starts[0]
    costs.ops_left = _ASSIGNMENT_OPS
    target_s = workload.compute_s + _NEAR_BOUND * max(entry.exposed_s for entry in shares)
    return LocalSearch(costs, target_s).run(starts)


def _improved_seeds(search: PlacementSearch, costs: PlanCosts, shares: list[OptimalShares]) -> list[Placement]:
    """Return the placements that the search finds from its seeds, and from the best of them on a throttled CPU."""
    improved = [search.improve(seed) for seed in search.seeds(shares, _SEEDS)]
    if costs.cpu_slows_copies:
        best = min(improved, key=search.cost)
        improved += [search.improve(replace(best, cpu_share=share)) for share in _THROTTLED_STARTS]
    return improved


def _search_merged(levels: list[Level], shares: list[OptimalShares]) -> list[Assignment]:
    """Return the best assignment of each level: found with the fewest subgroups, and then refined."""
    search = _forward_search(levels[0])
    placement = min(_improved_seeds(search, levels[0].costs, shares), key=search.cost)
    assignments = [search.assignment(placement)]
    for coarse, fine in itertools.pairwise(levels):
        search = _forward_search(fine)
        factor = coarse.merged.factor // fine.merged.factor
        placement = search.shrink_to_fit(placement.split(factor, coarse.merged.buffers), factor)
        placement = search.improve(placement, step=max(1, factor // 2))
        assignments.append(search.assignment(placement))
    return assignments


def _forward_search(level: Level) -> PlacementSearch:
    return PlacementSearch(level.costs, range(len(level.merged.workload.subgroups)))


def _rankings(workload: Workload) -> list[tuple[int, ...]]:
    """Return the orders in which placements choose subgroups: the first ones, small ones, and large ones first."""
    sizes = workload.subgroups
    forward = range(len(sizes))
    orders = (forward, sorted(forward, key=sizes.__getitem__), sorted(forward, key=lambda subgroup: -sizes[subgroup]))
    is_even = len(set(sizes[:-1])) <= 1
    return list(dict.fromkeys(tuple(order) for order in orders[: 1 if is_even and sizes[-1] <= sizes[0] else None]))


def _summary(assignment: Assignment, cpu_share: float) -> str:
    """Return an assignment in words."""
    parked = len(assignment.early & assignment.late)
    counts = {"resident": len(assignment.resident), "parked": parked, "streamed": len(assignment.moved) - parked}
    on_gpu = "".join(f"{number} {name}, " for name, number in counts.items() if number)
    throttled = f" at {100 * cpu_share:.3g} % of its rate" if cpu_share < 1 else ""
    return f"{on_gpu}{len(assignment.on_cpu)} on the CPU{throttled}"
