"""Megatron-LM's HybridDeviceOptimizer: a fixed fraction of the state on the CPU."""

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

from ebbtide.features.systems.torch_updates import THREADS, with_torch_rate
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Policy, SystemRun, system
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# Recommendations search for the best fraction.
_RUN = SystemRun("megatron-hybrid:0.5,overlap=copies", 30, ())


@system(
    "megatron-hybrid",
    _RUN,
    overlap=("none", "copies"),
    masters=("cpu", "gpu"),
    threads=THREADS,
)
def megatron_hybrid(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update the fraction F of the parameters on the CPU and the rest on the GPU, as
    Megatron-LM's HybridDeviceOptimizer does.

    F is rounded up to whole subgroups, the first ones. Gradients and parameters cross
    the link in fp32, at the step: all gradients, then all updates, then all parameters;
    with `overlap=copies` each as soon as it can. With `masters=gpu` the GPU keeps fp32
    masters of all parameters, as without --use-precision-aware-optimizer. torch's fused
    AdamW updates, on one thread or `threads=all`."""
    fraction = policy.number("the fraction on the CPU", None, 0.0, 1.0)
    builder = PlanBuilder(policy.text, workload)
    on_cpu = range(
        bisect_left(
            [*accumulate(builder.sizes, initial=0)], fraction * sum(builder.sizes)
        )
    )
    resident = range(len(on_cpu), len(builder.sizes))
    builder.gradients_at_step(frozenset(resident), MASTER_BYTES)
    for subgroup in resident:
        builder.resident(subgroup)
    keeps_masters = policy.options["masters"] == "gpu"
    copies = () if policy.overlap == "copies" else builder.copied_gradients()
    updates = [builder.update_on_cpu(subgroup, copies) for subgroup in on_cpu]
    for subgroup, update in zip(on_cpu, updates, strict=True):
        after = (update,) if policy.overlap == "copies" else (update, updates[-1])
        builder.upload_masters(subgroup, after, staged=not keeps_masters)
    plan = with_torch_rate(builder.plan(), workload, machine, policy)
    if not keeps_masters:
        return plan
    masters_bytes = MASTER_BYTES * sum(builder.sizes[subgroup] for subgroup in on_cpu)
    return replace(plan, resident_bytes=plan.resident_bytes + masters_bytes)
