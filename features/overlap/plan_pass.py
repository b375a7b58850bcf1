"""The pass over plans, and over plans of a search, that lets updates run beside other
phases."""

from collections.abc import Mapping
from typing import ClassVar

from ebbtide.features.overlap.policy import late, with_overlap
from ebbtide.features.overlap.speculation import speculate
from ebbtide.interleave.model.operations import OVERLAP, Overlap
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Maker, Policy
from ebbtide.interleave.policies.search.assignment import Assignment
from ebbtide.machines.machine import Machine


class OverlapPass:
    """Applies the option `overlap` of policies that take it.

    Policies that search for plans with it themselves are left out.
    """

    name: ClassVar[str] = "overlap"
    position: ClassVar[int] = 30
    in_memory: ClassVar[bool] = True
    offers: ClassVar[Mapping[str, tuple[str, ...]]] = {"overlap": OVERLAP}
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def plan(
        self, make: Maker, policy: Policy, workload: Workload, machine: Machine
    ) -> Plan:
        """Return the plan of a policy with the best updates that its option allows."""
        plan = make(policy, workload, machine)
        is_taken = "overlap" in policy.registered.takes
        return (
            with_overlap(plan, workload, machine, policy.overlap) if is_taken else plan
        )

    def complete(self, plan: Plan, workload: Workload, machine: Machine) -> Plan:
        """Return a plan as it is."""
        return plan


OVERLAP_PASS = OverlapPass()


def beside_step(
    plan: Plan, workload: Workload, assignment: Assignment, overlap: Overlap
) -> Plan:
    """Return the plan of an assignment, with its updates beside the step, not
    validated."""
    if overlap.backward:
        uploads_first = assignment.uploads_first and not overlap.forward
        plan = speculate(plan, workload, assignment.speculated, uploads_first)
    if overlap.forward:
        on_time = () if assignment.moved_late else assignment.moved
        plan = late(plan, workload, frozenset(on_time))
    return plan
