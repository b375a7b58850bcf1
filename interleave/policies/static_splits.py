"""Policies that keep a share of the state on the GPU, and update the rest on the CPU.

The share may be none, or all.
"""

from dataclasses import replace

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import (
    GRADS,
    PARAMS,
    PARAMS_BLOCKING,
    DefaultRun,
    Policy,
    policy,
)
from ebbtide.machines.machine import Machine


@policy(
    "zero-offload",
    DefaultRun("zero-offload", position=10),
    grads=GRADS,
    params=PARAMS_BLOCKING,
)
def zero_offload(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update every subgroup on the CPU as DeepSpeed does: one by one, conversion and
    copy inside the loop."""
    policy.reject_value()
    return split_plan(workload, policy, range(0))


@policy(
    "twin-flow",
    DefaultRun("twin-flow:0.5", position=20),
    grads=GRADS,
    params=PARAMS_BLOCKING,
)
def twin_flow(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Split statically: the share R after the colon is updated on the CPU, the rest
    stays resident on the GPU."""
    ratio = policy.number("the share on the CPU", None, 0.0, 1.0)
    plan = split_plan(
        workload, policy, workload.split.resident(ratio, len(workload.subgroups))
    )
    return (
        plan
        if workload.in_own_engine
        else with_gradient_buffers(plan, workload, offloads=True)
    )


@policy(
    "pipelined",
    DefaultRun("pipelined", position=30),
    grads=GRADS,
    takes=("overlap",),
    params=PARAMS,
)
def pipelined(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update all subgroups on the CPU, conversions and copies overlapped: the fair
    baseline for interleaving."""
    policy.reject_value()
    return split_plan(workload, policy, range(0))


@policy("gpu-only", DefaultRun("gpu-only", position=60), keeps_state=True)
def gpu_only(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep all state resident on the GPU: the limit if memory does not matter."""
    policy.reject_value()
    plan = split_plan(workload, policy, range(len(workload.subgroups)))
    return (
        plan
        if workload.framework is None
        else with_gradient_buffers(plan, workload, offloads=False)
    )


def with_gradient_buffers(plan: Plan, workload: Workload, offloads: bool) -> Plan:
    """Return a plan with the memory, beside resident state, for gradients that the
    split keeps.

    `offloads`: whether other state is in host memory."""
    resident = [workload.subgroups[subgroup] for subgroup in plan.resident]
    buffers = workload.split.gradient_bytes(resident, workload.grad_bytes, offloads)
    return replace(
        plan, resident_bytes=plan.resident_bytes + buffers, has_gradient_buffers=True
    )


def split_plan(workload: Workload, policy: Policy, resident: range) -> Plan:
    """Make the plan with some resident subgroups.

    The others are updated on the CPU by the options `grads` and `params`.

    One loop over the subgroups launches an update on the GPU when it gets there."""
    builder = PlanBuilder(
        policy.text, workload, policy.options.get("grads") == "blocking"
    )
    builder.gradients(keep=frozenset(resident))
    previous_upload: tuple[int, ...] = ()
    for subgroup in range(len(builder.sizes)):
        if subgroup in resident:
            builder.resident(subgroup, previous_upload)
            continue
        params = policy.options["params"]
        upload = builder.on_cpu(subgroup, params, previous_upload)
        previous_upload = (upload,) if params == "blocking" else ()
    return builder.plan()
