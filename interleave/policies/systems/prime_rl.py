"""The full offload of prime-rl: the CPU updates while gradients arrive."""

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.interleave.policies.systems.unclipped import unclipped_builder, unclipped_plan
from ebbtide.machines.machine import Machine


@policy("prime-rl", SystemRun("prime-rl", 50), simulation_only=True, uses_storage=False)
def prime_rl(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update each subgroup on the CPU as soon as its gradient is there, and upload it within the backward, as prime-rl
    does with `full_offload`. It does not clip."""
    reject_value(spec)
    builder = unclipped_builder(spec.text, workload)
    builder.gradients()
    for subgroup in reversed(range(len(builder.sizes))):
        builder.on_cpu(subgroup)
    return unclipped_plan(builder, workload, "prime-rl")
