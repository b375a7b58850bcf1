"""A policy that speculates whatever it gains."""

from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.features.overlap.policy import late
from ebbtide.features.overlap.speculation import speculate
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import POLICIES, Policy, as_policy, policy
from ebbtide.machines.machine import Machine


@contextmanager
def speculating() -> Iterator[None]:
    """Register a policy that speculates a number of subgroups; `speculating` alone does
    all."""

    @policy(
        "speculating", overlap=("backward", "both"), base=("pipelined", "interleaved:2")
    )
    def speculating(workload: Workload, machine: Machine, chosen: Policy) -> Plan:
        """Speculate."""
        plan = as_policy(chosen.options["base"]).plan_in_memory(workload, machine)
        count = round(chosen.number("a number of subgroups", 1e6, 0, 1e6))
        plan = speculate(plan, workload, count, uploads_first=count % 2 == 0)
        return (
            late(plan, workload) if chosen.options["overlap"] == "both" else plan
        ).validate(workload)

    try:
        yield
    finally:
        del POLICIES["speculating"]
