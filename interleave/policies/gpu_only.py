"""No offload: all optimizer state on the GPU."""

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import DefaultRun, PolicySpec, policy, reject_value
from ebbtide.machines.machine import Machine


@policy("gpu-only", DefaultRun("gpu-only", position=60), in_deepspeed=True)
def gpu_only(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Keep all state resident on the GPU: the limit if memory does not matter."""
    reject_value(spec)
    return all_resident(workload, spec.text)


def all_resident(workload: Workload, text: str) -> Plan:
    """Make the plan that keeps all state on the GPU, for the policy with a string."""
    builder = PlanBuilder(text, workload)
    subgroups = range(len(builder.sizes))
    builder.gradients(keep=frozenset(subgroups))
    for subgroup in subgroups:
        builder.resident(subgroup)
    return builder.plan()
