"""The adaptive policy: where each subgroup's state is kept and updated follows from the machine and the free memory."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.placement import Placement
from ebbtide.interleave.policies.placement_search import PlacementSearch
from ebbtide.interleave.policies.registry import DefaultRun, PolicySpec, make_plan, policy, reject_value
from ebbtide.machines.machine import Machine

# The search simulates some hundred plans. Neighbouring subgroups are merged until there are at most this many.
_MAX_SEARCHED_SUBGROUPS = 64
# The placement is then refined with all subgroups, by plans that have so many subgroups together, but at least so many
# plans.
_MAX_REFINED_SUBGROUPS = 8_000
_MIN_REFINED_PLANS = 4
# How many seeds the search starts from.
_SEEDS = 4
# How many of the other policies' plans are compared again with all subgroups.
_COMPARED_AFTER_REFINING = 3
# The plans of other policies that the result is compared with. The fastest of them is taken if it is faster.
_OTHERS = (
    "pipelined",
    *(f"twin-flow:{share / 10:g},params=pipelined" for share in range(10)),
    *(f"interleaved:{stride}@{share / 10:g}" for stride in range(1, 11) for share in range(10, 0, -1)),
)


@policy("adaptive", DefaultRun("adaptive", position=50))
def adaptive(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Keep state resident in memory that is always free, park it in windows, stream it or update on the CPU, as the
    rates allow."""
    reject_value(spec)
    if workload.gpu_free is None:
        raise PolicyError(
            f"{spec.text!r} needs to know what device memory is free: give it (--free-bytes 20GiB, or gpu_free_bytes "
            "in a workload file), or a trace with the memory of a GPU"
        )
    merged, factor = _merge_neighbours(workload)
    coarse_search = PlacementSearch(merged, machine, spec.text)
    others = {text: coarse_search.cost_of_plan(make_plan(text, merged, machine)) for text in _OTHERS}
    ranked = sorted(others, key=lambda text: others[text])
    seeds = coarse_search.seeds()
    placement = coarse_search.best_of([coarse_search.improve(seed) for seed in seeds[:_SEEDS]])
    search = coarse_search
    if factor > 1:
        search = PlacementSearch(workload, machine, spec.text)
        max_plans = max(_MIN_REFINED_PLANS, _MAX_REFINED_SUBGROUPS // len(workload.subgroups))
        start = search.shrink_to_fit(placement.scaled(factor), factor)
        placement = search.improve(start, step=max(1, factor // 2), max_plans=max_plans)
    plan = search.plan(placement)
    for text in ranked[: _COMPARED_AFTER_REFINING if factor > 1 else None]:
        other = make_plan(text, workload, machine)
        if search.cost_of_plan(other) < search.cost_of_plan(plan) * (1 - 1e-12):
            plan = replace(other, policy=spec.text, remark=f"the plan of {text}")
    if plan.remark:
        return plan
    summary = _summary(placement, len(workload.subgroups))
    return replace(plan, remark=f"{summary}; the best of the others was {ranked[0]}")


def _summary(placement: Placement, count: int) -> str:
    """Return a placement of `count` subgroups in words."""
    streamed = placement.moved - placement.parked
    counts = {"resident": placement.resident, "parked": placement.parked, "streamed": streamed}
    on_gpu = "".join(f"{number} {name}, " for name, number in counts.items() if number)
    return f"{on_gpu}{placement.on_cpu(count)} on the CPU"


def _merge_neighbours(workload: Workload) -> tuple[Workload, int]:
    """Return the workload with neighbouring subgroups merged, and how many are merged into one."""
    sizes = workload.subgroups
    factor = -(-len(sizes) // _MAX_SEARCHED_SUBGROUPS)
    if factor == 1:
        return workload, 1
    merged = tuple(sum(sizes[start : start + factor]) for start in range(0, len(sizes), factor))
    return replace(workload, sizes=merged), factor
