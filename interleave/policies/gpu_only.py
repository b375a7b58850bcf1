"""Nothing offloaded."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Choice, nothing_after_colon, policy
from ebbtide.machines.machine import Machine


@policy("gpu-only")
def gpu_only(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """All state resident on the GPU: the bound when memory is no object."""
    nothing_after_colon(choice)
    builder = PlanBuilder(choice.text, workload)
    everything = range(len(builder.sizes))
    builder.gradients(keep=frozenset(everything))
    for subgroup in everything:
        builder.resident(subgroup)
    return builder.plan()
