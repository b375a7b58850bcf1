"""FSDP2's CPUOffloadPolicy: parameters, gradients and state on the host, all or nothing."""

from dataclasses import replace

from ebbtide.interleave.model.operations import ONE_UPLOAD, Departures
from ebbtide.interleave.model.plan import Plan, backward_points, forward_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES


@policy("fsdp2-offload", SystemRun("fsdp2-offload", 70), simulation_only=True, uses_storage=False)
def fsdp2_offload(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Keep parameters and state on the host and update all on the CPU at the step, as FSDP2 does with CPUOffloadPolicy.

    Gradients are copied to the host in fp32 within the backward. Parameters are copied to the device twice, in fp32:
    before the forward and before the backward of each subgroup uses them. The forward waits for them."""
    reject_value(spec)
    builder = PlanBuilder(spec.text, workload)
    needed, count = forward_points(workload), len(builder.sizes)
    for subgroup, point in reversed(list(enumerate(backward_points(workload)))):
        builder.add("upload", "h2d", subgroup, MASTER_BYTES, point=point)
    builder.gradients(bytes_per_param=MASTER_BYTES)
    for subgroup in range(count):
        update = builder.update_on_cpu(subgroup)
        builder.add("upload", "h2d", subgroup, MASTER_BYTES, (update,), due=needed[subgroup])
    plan = builder.plan(validate=False)
    return replace(plan, departures=Departures(frozenset({ONE_UPLOAD}))).validate(workload)
