"""The best plan that the search finds: its own placements and assignments, compared with all other policies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from ebbtide.errors import MachineError, PolicyError
from ebbtide.features.storage.policy import with_default_storage
from ebbtide.interleave.model.operations import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import POLICIES, DefaultRun, Policy
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.local_search import LocalSearch
from ebbtide.interleave.policies.search.placement_search import START_SHARE, Placement, PlacementSearch
from ebbtide.interleave.policies.search.plan_costs import INFINITE, PlanCosts
from ebbtide.interleave.simulation.bound import OptimalShares, min_iteration_s, optimal_shares
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine

# More subgroups than these are merged for the search over placements, and not searched one by one.
_MAX_SEARCHED_SUBGROUPS = 40
_MAX_SUBGROUPS_ONE_BY_ONE = 24
# With more subgroups than these, the search is refined with so many before it is with all of them.
_MAX_REFINED_SUBGROUPS = 256
# Work of the search over placements, at each number of subgroups, and of that over assignments (see `PlanCosts`).
_PLACEMENT_OPS = 60_000
_ASSIGNMENT_OPS = 50_000
# The same, each, where layers move: many plans are searched for, and copies of layers delay those of state.
_OPS_BESIDE_LAYERS = 20_000
# How many placements, of how many rankings of the subgroups, the search starts from.
_SEEDS = 3
# Rates, of which each alone is lower on the slower machines whose best placements are starts, by which factor, and the
# work for each of them.
_SLOWER_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "cpu_update_params_per_s", "gpu_update_params_per_s")
_SLOWER, _SLOWER_OPS = 0.6, 3_000
# Shares of the CPU's update rate that the search starts from once more, where it may slow copies.
_THROTTLED_STARTS = (0.9, 0.5, 0.25)
# The search ends when the cost is within this factor of the bound.
_NEAR_BOUND = 1.001
# A bound must exceed a plan by this share to rule out that there is a faster one.
_BOUND_TOLERANCE = 1e-6
# How many searches are remembered: replays, recommendations and ablations repeat them.
_REMEMBERED = 16
# Another plan must be shorter than the own one by this share to be preferred.
_LEAST_GAIN = 1e-12
# So many subgroups may the work of other plans differ by if subgroups are merged.
_LOST_SUBGROUPS = 2
# How many other plans are simulated at the level between few subgroups and all.
_OTHER_PLANS_BETWEEN = 12
# Other plans are simulated with all subgroups until they have so many together, but at least the likeliest one.
_OTHER_SUBGROUPS = 4_000
# So many slots on the device suffice to fetch, update and flush at the same time.
_BUFFERS = 3


def find_best_plan(workload: Workload, machine: Machine, policy: Policy, *overlaps: Overlap) -> Plan:
    """Return the fastest plan found, with a remark that says what it is.

    It is never slower than the one without overlap. The free device memory must be known. A machine without a rate of
    updates on the GPU has none of them. Of equally fast plans the one of the first overlap is returned."""
    best: Plan | None = None
    best_cost = (True, True, INFINITE)
    # The widest overlap first: its plan is often faster than any plan of the others can be.
    for overlap in reversed(dict.fromkeys((NO_OVERLAP, *overlaps))):
        fits_memory = not (best_cost[0] or best_cost[1])
        if fits_memory and min_iteration_s(workload, machine, overlap) > best_cost[2] * (1 + _BOUND_TOLERANCE):
            continue
        plan = search_plan(workload, machine, policy.name, overlap)
        cost = best_cost
        if overlaps:
            stored = with_default_storage(plan, workload, machine)
            cost = simulate_steps(stored, workload, machine).cost(machine)
        if best is None or cost <= best_cost:
            best, best_cost = plan, cost
    assert best is not None
    return replace(best, policy=policy.text)


@lru_cache(maxsize=_REMEMBERED)
def search_plan(workload: Workload, machine: Machine, text: str, overlap: Overlap) -> Plan:
    """Return the fastest plan found with an overlap. The last results are remembered."""
    # From few subgroups to all of them.
    max_ops = _OPS_BESIDE_LAYERS if workload.layer_memory else _PLACEMENT_OPS
    levels = [
        Level(merged, PlanCosts(merged.workload, machine, text, max_ops, overlap))
        for merged in merged_workloads(workload, _MAX_SEARCHED_SUBGROUPS, _MAX_REFINED_SUBGROUPS)
    ]
    shares = [optimal_shares(levels[0].merged.workload, machine, whole, overlap) for whole in (False, True)]
    assignments = _search_merged(levels, shares) if len(levels) > 1 else [_search_one_by_one(levels[0].costs, shares)]
    costs = levels[-1].costs
    plan = costs.plan(assignments[-1])
    own_cost = costs.seconds(assignments[-1])
    others = rank_others(levels[0].costs, text)
    remark = _summary(assignments[-1], plan.cpu_share)
    best_other = next(iter(others), None)
    if best_other is not None and others[best_other] < INFINITE:
        remark += f"; the best of the others was {best_other}"
    best, best_cost = replace(plan, remark=remark), own_cost * (1 - _LEAST_GAIN)
    for other_policy in worth_comparing(others, levels, assignments):
        other = other_policy.plan_in_memory(workload, machine)
        cost = costs.seconds_of_plan(other, best_cost)
        if cost < best_cost:
            best, best_cost = replace(other, policy=text, remark=f"the plan of {other_policy}"), cost
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
    costs.ops_left = _OPS_BESIDE_LAYERS if workload.layer_memory else _ASSIGNMENT_OPS
    target_s = workload.compute_s + _NEAR_BOUND * max(entry.exposed_s for entry in shares)
    return LocalSearch(costs, target_s).run(starts)


def _improved_seeds(
    search: PlacementSearch, costs: PlanCosts, shares: list[OptimalShares], share: float = 1.0
) -> list[Placement]:
    """Return the placements that the search finds from its seeds, and from the best of them on a throttled CPU.

    Each start takes at most a share of the work that is left."""
    improved = [search.improve(seed, share=share) for seed in search.seeds(shares, _SEEDS)]
    improved += [search.improve(mode, share=share) for mode in search.modes(min(improved, key=search.cost))]
    if costs.cpu_slows_copies:
        best = min(improved, key=search.cost)
        throttled = (best._replace(cpu_share=cpu_share) for cpu_share in _THROTTLED_STARTS)
        improved += [search.improve(start, share=share) for start in throttled]
    # A slower machine's best placement is another start, so that a faster machine has no worse plan.
    for key in () if costs.workload.layer_memory else _SLOWER_RATES:
        if (rate := getattr(costs.machine, key)) is not None:
            best = min(improved, key=search.cost)
            slower = replace(costs.machine, **{key: _SLOWER * rate})
            start = search.on(PlanCosts(costs.workload, slower, costs.text, _SLOWER_OPS, costs.overlap)).improve(best)
            starts = [start]
            if key == "cpu_update_params_per_s" and costs.cpu_slows_copies:
                starts.append(start._replace(cpu_share=_SLOWER * start.cpu_share))
            improved += [search.improve(start, share=share) for start in starts]
    return sorted(dict.fromkeys(improved), key=search.cost)[:_SEEDS]


def _search_merged(levels: list[Level], shares: list[OptimalShares]) -> list[Assignment]:
    """Return the best assignment of each level: found with the fewest subgroups, and then refined."""
    search = _forward_search(levels[0])
    placements = _improved_seeds(search, levels[0].costs, shares, START_SHARE)
    placements = sorted([search.explore(search.improve(placements[0])), *placements], key=search.cost)[:_SEEDS]
    assignments = [search.assignment(placements[0])]
    for coarse, fine in itertools.pairwise(levels):
        search = _forward_search(fine)
        factor = coarse.merged.factor // fine.merged.factor
        split = [placement.split(factor, coarse.merged.buffers) for placement in placements]
        placements = sorted(dict.fromkeys(search.shrink_to_fit(start, factor) for start in split), key=search.cost)
        # Merged subgroups differ from single ones, so the best start may not lead to the best placement.
        step = max(1, factor // 2)
        best = search.improve(placements[0], step)
        starts = [*map(search.with_fewer_moved, search.modes(best)), *placements[1:]]
        best = min([best, *(search.improve(start, step, START_SHARE) for start in starts)], key=search.cost)
        # The best start may have ended with its share of the work.
        placements[0] = search.improve(search.explore(best), step=1)
        assignments.append(search.assignment(placements[0]))
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


class Level(NamedTuple):
    """A workload with some of its subgroups merged, or none, and the costs of its plans."""

    merged: MergedWorkload
    costs: PlanCosts


def rank_others(costs: PlanCosts, own_name: str) -> dict[Policy, float]:
    """Return the costs of the plans of the other built-in policies, cheapest first; infinite if one does not fit or is
    not among the best. Policies that the machine lacks rates for are left out.

    The first one's cost is exact; others are simulated only as far as is needed for that. The policy `own_name` is left
    out."""
    others = _others(own_name, len(costs.workload.subgroups), costs.overlap)
    plans = {policy: plan for policy in others if (plan := _plan(costs, policy))}
    minimums = {policy: costs.minimums.of_plan(plan) for policy, plan in plans.items()}
    best = INFINITE
    ranked = {}
    for policy in sorted(plans, key=minimums.__getitem__):
        ranked[policy] = costs.seconds_of_plan(plans[policy]) if minimums[policy] < best else INFINITE
        best = min(best, ranked[policy])
    return dict(sorted(ranked.items(), key=lambda entry: entry[1]))


def worth_comparing(others: dict[Policy, float], levels: list[Level], own: list[Assignment]) -> list[Policy]:
    """Return the policies whose plans with all subgroups may be faster than the own one, the likeliest first.

    Plans of merged subgroups cost about the same as those of all subgroups, except for the time in which the first and
    the last one are alone. So a policy is left out if its plan of fewer subgroups takes longer than the own one, even
    with a few merged subgroups less. `others` are the plans with the fewest subgroups, `levels` are from few subgroups
    to all, `own` is the assignment of each level."""
    own_cost = levels[-1].costs.seconds(own[-1])
    if len(levels) == 1:
        return [policy for policy, cost in others.items() if cost < own_cost]
    compute_s = levels[0].merged.workload.compute_s

    def limit_of(level: Level, assignment: Assignment) -> float:
        limit = max(own_cost, level.costs.seconds(assignment))
        return limit + (limit - compute_s) * _LOST_SUBGROUPS / len(level.merged.workload.subgroups)

    policies = [policy for policy, cost in others.items() if cost < limit_of(levels[0], own[0])]
    for level, assignment in list(zip(levels, own, strict=True))[1:-1]:
        limit = limit_of(level, assignment)
        plans = {policy: _plan(level.costs, policy) for policy in policies[:_OTHER_PLANS_BETWEEN]}
        costs = {policy: level.costs.seconds_of_plan(plan, limit) for policy, plan in plans.items() if plan is not None}
        policies = sorted((policy for policy in costs if costs[policy] < limit), key=costs.__getitem__)
    return policies[: max(1, _OTHER_SUBGROUPS // len(levels[-1].merged.workload.subgroups))]


def _others(own_name: str, count: int, overlap: Overlap) -> Iterator[Policy]:
    """Yield all policies that plans of so many subgroups are compared with.

    With an overlap these are the policies that have the option, since others are compared without it. Variants do not
    speculate: how much would have to be searched for each."""
    for name, registered in POLICIES.items():
        if not isinstance(registered.run, DefaultRun) or name == own_name:
            continue
        if overlap == NO_OVERLAP:
            yield registered.typical
        elif "overlap" in registered.options:
            yield registered.typical.with_options(overlap=overlap.name)
    for policy in _variants():
        if overlap != NO_OVERLAP and not (overlap.forward and "overlap" in policy.options):
            continue
        # Larger strides than there are subgroups are all alike.
        if policy.name != "interleaved" or int((policy.value or "").partition("@")[0]) <= count:
            yield policy if overlap == NO_OVERLAP else policy.with_options(overlap="forward")


@cache
def _variants() -> list[Policy]:
    """Return the policies that are compared, besides those of their default runs."""
    splits = [Policy.make("twin-flow", f"{share / 10:g}", params="pipelined") for share in range(10)]
    strides = itertools.product(range(1, 11), range(10, 0, -1))
    return splits + [Policy.make("interleaved", f"{stride}@{share / 10:g}") for stride, share in strides]


def _plan(costs: PlanCosts, policy: Policy) -> Plan | None:
    """Return a policy's plan, None if it has none for this machine or its resident state does not fit."""
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
    # In the update so many merged subgroups take the memory of single ones: the few slots through which state is
    # streamed must be no larger than in the real workload. The free memory is larger instead.
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
    merged = tuple(sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor))
    largest_bytes = workload.state_bytes * max(sizes)
    steps = workload.gpu_free or ((0.0, 0.0),)
    in_update = workload.gpu_free_from(workload.compute_s)
    buffers = min(_BUFFERS, int(max(size for _, size in in_update) / largest_bytes * (1 + 1e-9)))
    growth = max(merged) / max(sizes) - 1
    before = tuple(step for step in steps if step[0] < workload.compute_s)
    larger = tuple((time, size + growth * min(size, buffers * largest_bytes)) for time, size in in_update)
    return MergedWorkload(replace(workload, sizes=merged, gpu_free=before + larger), factor, buffers)
