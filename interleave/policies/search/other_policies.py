"""The plans of the other policies, which the adaptive policy compares its own with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.errors import MachineError, PolicyError
from ebbtide.interleave.model.overlap import NO_OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.policies.registry import POLICIES, parse, plan_in_memory
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.interleave.policies.search.merging import MergedWorkload
from ebbtide.interleave.policies.search.minimum_costs import INFINITE
from ebbtide.interleave.policies.search.plan_costs import PlanCosts

# Parameters of policies that are compared, besides those of their default runs.
_VARIANTS = (
    *(f"twin-flow:{share / 10:g},params=pipelined" for share in range(10)),
    *(f"interleaved:{stride}@{share / 10:g}" for stride in range(1, 11) for share in range(10, 0, -1)),
)
# So many subgroups may the work of other plans differ by if subgroups are merged.
_LOST_SUBGROUPS = 2
# How many other plans are simulated at the level between few subgroups and all.
_OTHER_PLANS_BETWEEN = 12
# Other plans are simulated with all subgroups until they have so many together, but at least the likeliest one.
_OTHER_SUBGROUPS = 4_000


class Level(NamedTuple):
    """A workload with some of its subgroups merged, or none, and the costs of its plans."""

    merged: MergedWorkload
    costs: PlanCosts


@dataclass(frozen=True)
class OtherPlan:
    """The plan of another policy.

    Attributes:
        text: The policy's string.
        min_cost: A lower bound of its cost (see `PlanCosts`).
        cost: Its cost; infinite if it does not fit or is not among the best.
    """

    text: str
    min_cost: float
    cost: float


def rank_others(costs: PlanCosts, own_text: str) -> list[OtherPlan]:
    """Return the plans of the other built-in policies, cheapest first. Policies that the machine lacks rates for are
    left out.

    The first one's cost is exact; others are simulated only as far as is needed for that.

    Args:
        costs: Simulates plans.
        own_text: Name of the policy that is compared, which is left out.
    """
    texts = _texts(own_text, len(costs.workload.subgroups), costs.overlap)
    plans = {text: plan for text in texts if (plan := _plan(costs, text))}
    minimums = {text: costs.min_cost_of_plan(plan) for text, plan in plans.items()}
    best = INFINITE
    ranked = []
    for text in sorted(plans, key=minimums.__getitem__):
        cost = costs.seconds_of_plan(plans[text]) if minimums[text] < best else INFINITE
        best = min(best, cost)
        ranked.append(OtherPlan(text, minimums[text], cost))
    return sorted(ranked, key=lambda other: (other.cost, other.min_cost))


def worth_comparing(others: list[OtherPlan], levels: list[Level], own: list[Assignment]) -> list[str]:
    """Return the policies whose plans with all subgroups may be faster than the own one, the likeliest first.

    Plans of merged subgroups cost about the same as those of all subgroups, except for the time in which the first
    and the last one are alone. So a policy is left out if its work alone takes longer than the own plan, even with a
    few merged subgroups less; then, where there is a level between few subgroups and all, if its plan takes longer
    there.

    Args:
        others: The plans with the fewest subgroups, the best first.
        levels: The workload with few subgroups, perhaps with more, and with all.
        own: The own assignment of each level.
    """
    own_cost = levels[-1].costs.seconds(own[-1])
    if len(levels) == 1:
        return [other.text for other in others if other.cost < own_cost]
    compute_s = levels[0].merged.workload.compute_s
    rest = 1 - _LOST_SUBGROUPS / len(levels[0].merged.workload.subgroups)
    possible = [other for other in others if compute_s + (other.min_cost - compute_s) * rest < own_cost]
    # The best one of each policy, then the best of all.
    first_of_policy = {parse(other.text).name: other.text for other in reversed(possible)}
    texts = list(dict.fromkeys([*first_of_policy.values(), *(other.text for other in possible)]))
    for level, assignment in list(zip(levels, own, strict=True))[1:-1]:
        count = len(level.merged.workload.subgroups)
        limit = max(own_cost, level.costs.seconds(assignment))
        limit += (limit - compute_s) * _LOST_SUBGROUPS / count
        plans = {text: _plan(level.costs, text) for text in texts[:_OTHER_PLANS_BETWEEN]}
        costs = {text: level.costs.seconds_of_plan(plan, limit) for text, plan in plans.items() if plan is not None}
        texts = sorted((text for text in costs if costs[text] < limit), key=costs.__getitem__)
    return texts[: max(1, _OTHER_SUBGROUPS // len(levels[-1].merged.workload.subgroups))]


def _texts(own_text: str, count: int, overlap: Overlap) -> Iterator[str]:
    """Yield the strings of all policies that plans of so many subgroups are compared with.

    With an overlap these are the policies that have the option, since others are compared without it. Variants do not
    speculate: how much would have to be searched for each.
    """
    option = "" if overlap == NO_OVERLAP else f",overlap={overlap.name}"
    for name, registered in POLICIES.items():
        if registered.default_run is None or name == parse(own_text).name:
            continue
        if not option or "overlap" in registered.options:
            yield registered.default_run.text + option
    for text in _VARIANTS:
        spec = parse(text)
        if option and ("overlap" not in POLICIES[spec.name].options or not overlap.forward):
            continue
        # Larger strides than there are subgroups are all alike.
        if spec.name != "interleaved" or int((spec.value or "").partition("@")[0]) <= count:
            yield text + (",overlap=forward" if option else "")


def _plan(costs: PlanCosts, text: str) -> Plan | None:
    """Return a policy's plan, None if it has none for this machine or its resident state does not fit."""
    try:
        plan = plan_in_memory(text, costs.workload, costs.machine)
        costs.min_cost_of_plan(plan)
    except (MachineError, PolicyError):
        return None
    return plan if plan.resident_bytes <= costs.memory.always * (1 + 1e-9) + 1 else None
