"""torchao's CPUOffloadOptimizer: the CPU updates tensor by tensor, uploads follow the last gradient."""

from dataclasses import replace

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.interleave.policies.systems.unclipped import unclipped_builder, unclipped_plan
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import STATE_BYTES


@policy("torchao", SystemRun("torchao", 60), simulation_only=True, uses_storage=False, backward=("eager", "compiled"))
def torchao(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update on the CPU in the order in which gradients come, as torchao's CPUOffloadOptimizer does. It does not clip.

    One stream copies gradients and parameters, so no parameter is uploaded before the last gradient is on the host.
    The step is called when the backward is launched, not when it is done, so that updates overlap it
    (`backward=eager`). A compiled backward returns all gradients at its end: with `backward=compiled` nothing overlaps.
    """
    reject_value(spec)
    builder = unclipped_builder(spec.text, workload)
    if spec.options["backward"] == "compiled":
        builder.early = False
        builder.gradients_at_step(frozenset(), workload.grad_bytes)
    else:
        builder.gradients()
    copies = builder.copied_gradients()
    order = list(reversed(range(len(builder.sizes))))
    for subgroup in order:
        update = builder.update_on_cpu(subgroup)
        builder.add("upload", "h2d", subgroup, workload.param_bytes, (update, *copies), builder.ops[update].point)
    plan = unclipped_plan(builder, workload, "torchao")
    if workload.state_bytes < STATE_BYTES:
        return plan
    no_masters = "torchao keeps no fp32 masters: parameters in half precision are updated in half precision"
    consequence = "; ".join(filter(None, (no_masters, plan.departures.consequence)))
    return replace(plan, departures=plan.departures._replace(consequence=consequence))
