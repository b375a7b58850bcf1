"""The best plan that the search finds.

Its own placements and assignments are compared with all other policies.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import POLICIES, DefaultRun, Policy, complete
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.local_search import LocalSearch
from ebbtide.interleave.policies.search.placement_search import STARTS, PlacementSearch
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from ebbtide.interleave.simulation.bound import (
    OptimalShares,
    min_iteration_s,
    optimal_shares,
)
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine

# More subgroups are merged for the first search, whose steps are then large in single
# ones, and for the second one.
_MERGED_SUBGROUPS = (40, 256)
# With more subgroups than these counts of them suffice: one of them has little effect.
_EXCHANGED_SUBGROUPS = 24
# Work of the search over placements at each number of subgroups, and of the exchange of
# roles, in simulated operations.
_MAX_OPS = 50_000
# The search ends when a plan takes at most so much longer than the bound: users cannot
# tell the difference.
_NEAR_BOUND = 1.001
# A difference by less is rounding of the linear program, or of the simulator.
_ROUNDING = 1e-6
# Searches that are remembered: replays, recommendations and ablations repeat them.
_REMEMBERED = 16
# So many subgroups may the work of other plans differ by if subgroups are merged.
_LOST_SUBGROUPS = 2
# So many slots on the device suffice to fetch, update and flush at the same time.
_BUFFERS = 3


def find_best_plan(
    workload: Workload, machine: Machine, policy: Policy, *overlaps: Overlap
) -> Plan:
    """Return the fastest plan that the search yields, never slower than the one without
    overlap, with a remark.

    The free device memory must be known. On a machine without a rate of updates on the
    GPU, plans have none of these. Of equally fast plans the one of the first overlap is
    returned."""
    best: Plan | None = None
    best_cost = (True, True, INFINITE)
    # The widest overlap first: its plan is often faster than any plan of the others can
    # be.
    for overlap in reversed(dict.fromkeys((NO_OVERLAP, *overlaps))):
        fits_memory = not (best_cost[0] or best_cost[1])
        if fits_memory and min_iteration_s(workload, machine, overlap) > best_cost[
            2
        ] * (1 + _ROUNDING):
            continue
        plan = search_plan(workload, machine, policy.name, overlap)
        cost = best_cost
        if overlaps:
            stored = complete(plan, workload, machine)
            cost = simulate_steps(stored, workload, machine).cost(machine)
        if best is None or cost <= best_cost:
            best, best_cost = plan, cost
    assert best is not None
    return replace(best, policy=policy.text)


@lru_cache(maxsize=_REMEMBERED)
def search_plan(
    workload: Workload, machine: Machine, text: str, overlap: Overlap
) -> Plan:
    """Return the fastest plan found with an overlap. The last results are
    remembered."""
    levels = [
        Level(merged, PlanCosts(merged.workload, machine, text, _MAX_OPS, overlap))
        for merged in merged_workloads(workload, *_MERGED_SUBGROUPS)
    ]
    merged = levels[0].merged.workload
    shares = [
        optimal_shares(merged, machine, whole, overlap) for whole in (False, True)
    ]
    target_s = workload.compute_s + _NEAR_BOUND * max(
        entry.exposed_s for entry in shares
    )
    if len(levels) == 1:
        assignments = [_search_roles(levels[0].costs, shares, target_s)]
    else:
        assignments = _search_counts(levels, shares, target_s)
    costs, assignment = levels[-1].costs, assignments[-1]
    plan, seconds = costs.plan(assignment), costs.seconds(assignment)
    best = replace(plan, remark=_summary(assignment, plan.cpu_share))
    others = rank_others(levels[0].costs, text)
    if others and min(others.values()) < INFINITE:
        best = replace(
            best,
            remark=(
                f"{best.remark}; the best of the others was "
                f"{min(others, key=others.__getitem__)}"
            ),
        )
    # Merged subgroups cost as much as single ones, but for the time in which the first
    # and the last one are alone.
    merged_s = levels[0].costs.seconds(assignments[0])
    limit_s = max(
        seconds,
        merged_s
        + (merged_s - workload.compute_s) * _LOST_SUBGROUPS / len(merged.subgroups),
    )
    for policy in (policy for policy, other_s in others.items() if other_s < limit_s):
        other = policy.plan_in_memory(workload, machine)
        other_s = costs.seconds_of_plan(other, seconds)
        if other_s < seconds:
            best, seconds = (
                replace(other, policy=text, remark=f"the plan of {policy}"),
                other_s,
            )
    return best


def _search_roles(
    costs: PlanCosts, shares: list[OptimalShares], target_s: float
) -> Assignment:
    """Return the best assignment of few subgroups, by their counts, then singly.

    Singly means that their roles are searched one by one.
    """
    workload = costs.workload
    starts = []
    for ranking in _rankings(workload):
        search = PlacementSearch(costs, ranking, target_s)
        starts += [search.assignment(placement) for placement in search.run(shares)]
    starts = sorted(dict.fromkeys(starts), key=costs.cost)
    if _is_even(workload) and len(workload.subgroups) > _EXCHANGED_SUBGROUPS:
        return starts[0]
    costs.ops_left = _MAX_OPS
    return LocalSearch(costs, target_s).run(starts[:STARTS])


def _search_counts(
    levels: list[Level], shares: list[OptimalShares], target_s: float
) -> list[Assignment]:
    """Return the best assignments of many subgroups by their counts: of merged
    subgroups, of fewer merged, and of all."""
    search = _forward_search(levels[0], target_s)
    placements = search.run(shares)
    assignments = [search.assignment(placements[0])]
    for coarse, fine in itertools.pairwise(levels):
        search = _forward_search(fine, target_s)
        factor = coarse.merged.factor // fine.merged.factor
        placements = search.refine(placements[:STARTS], factor, coarse.merged.buffers)
        assignments.append(search.assignment(placements[0]))
    return assignments


def _forward_search(level: Level, target_s: float) -> PlacementSearch:
    return PlacementSearch(
        level.costs, range(len(level.merged.workload.subgroups)), target_s
    )


def _is_even(workload: Workload) -> bool:
    """Return whether all subgroups but the last have one size."""
    return len(set(workload.subgroups[:-1])) <= 1


def _rankings(workload: Workload) -> list[tuple[int, ...]]:
    """Return the orders in which placements choose subgroups: the first ones, small
    ones, and large ones first."""
    sizes = workload.subgroups
    forward = range(len(sizes))
    orders = (
        forward,
        sorted(forward, key=sizes.__getitem__),
        sorted(forward, key=lambda subgroup: -sizes[subgroup]),
    )
    count = 1 if _is_even(workload) and sizes[-1] <= sizes[0] else len(orders)
    return list(dict.fromkeys(tuple(order) for order in orders[:count]))


def _summary(assignment: Assignment, cpu_share: float) -> str:
    """Return an assignment in words."""
    parked = len(assignment.early & assignment.late)
    counts = {
        "resident": len(assignment.resident),
        "parked": parked,
        "streamed": len(assignment.moved) - parked,
    }
    on_gpu = "".join(f"{number} {name}, " for name, number in counts.items() if number)
    throttled = f" at {100 * cpu_share:.3g} % of its rate" if cpu_share < 1 else ""
    return f"{on_gpu}{len(assignment.on_cpu)} on the CPU{throttled}"


class Level(NamedTuple):
    """A workload with some of its subgroups merged, and the costs of its plans.

    Perhaps none are merged.
    """

    merged: MergedWorkload
    costs: PlanCosts


def rank_others(costs: PlanCosts, own_name: str) -> dict[Policy, float]:
    """Return the seconds of the plans of the other built-in policies, infinite for one
    that does not fit.

    With an overlap these are the policies that have the option, since others are
    compared without it. Policies that the machine lacks rates for are left out.
    """
    seconds = {}
    for name, registered in POLICIES.items():
        if not isinstance(registered.run, DefaultRun) or name == own_name:
            continue
        policy = registered.typical
        if costs.overlap != NO_OVERLAP:
            if "overlap" not in registered.options:
                continue
            policy = policy.with_options(overlap=costs.overlap.name)
        plan = _plan(costs, policy)
        if plan is not None:
            seconds[policy] = costs.seconds_of_plan(plan)
    return seconds


def _plan(costs: PlanCosts, policy: Policy) -> Plan | None:
    """Return a policy's plan; None if it has none for this machine or its resident
    state does not fit."""
    try:
        plan = policy.plan_in_memory(costs.workload, costs.machine)
        costs.minimums.of_plan(plan)
    except (MachineError, PolicyError):
        return None
    return plan if plan.resident_bytes <= costs.memory.always * (1 + 1e-9) + 1 else None


@dataclass(frozen=True)
class MergedWorkload:
    """A workload with neighbouring subgroups merged."""

    workload: Workload
    factor: int
    # In the update this many merged subgroups take the memory of single ones: the few
    # slots through which state is streamed must be no larger than in the real workload.
    # The free memory is larger instead.
    buffers: int


def merged_workloads(workload: Workload, *max_subgroups: int) -> list[MergedWorkload]:
    """Return the workload with neighbouring subgroups merged, and at last as it is.

    `max_subgroups` are from few to many. Each factor divides the one before it."""
    factors = [1]
    for limit in reversed(max_subgroups):
        factor = factors[0] * -(-len(workload.subgroups) // (factors[0] * limit))
        if factor > factors[0]:
            factors.insert(0, factor)
    return [_merge_neighbours(workload, factor) for factor in factors]


def _merge_neighbours(workload: Workload, factor: int) -> MergedWorkload:
    if factor == 1:
        return MergedWorkload(workload, 1, 0)
    sizes = workload.subgroups
    merged = tuple(
        sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor)
    )
    largest_bytes = workload.state_bytes * max(sizes)
    steps = workload.gpu_free or ((0.0, 0.0),)
    in_update = workload.gpu_free_from(workload.compute_s)
    buffers = min(
        _BUFFERS, int(max(size for _, size in in_update) / largest_bytes * (1 + 1e-9))
    )
    growth = max(merged) / max(sizes) - 1
    before = tuple(step for step in steps if step[0] < workload.compute_s)
    larger = tuple(
        (time, size + growth * min(size, buffers * largest_bytes))
        for time, size in in_update
    )
    return MergedWorkload(
        replace(workload, sizes=merged, gpu_free=before + larger), factor, buffers
    )
