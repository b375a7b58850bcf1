"""MLP-Offload: state on several paths of storage at once, as much as possible kept in host memory."""

from dataclasses import replace

from ebbtide.errors import PolicyError
from ebbtide.interleave.model.plan import STEP, Plan
from ebbtide.interleave.model.schedule import available_host_bytes
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.interleave.policies.storage import StorageLayout, storage_summary, stored_in
from ebbtide.machines.machine import Machine

# Of each path: one subgroup is read, one updated, one written. Updates of state in memory are evenly spread, so that
# storage is busy meanwhile: MLP-Offload reads while it updates what the iteration before has left in memory.
_LAYOUT = StorageLayout("spread", 3)


@policy("mlp-offload", SystemRun("mlp-offload", 90), simulation_only=True, uses_storage=False)
def mlp_offload(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Keep the state that host memory does not hold on all paths of the storage at once, in proportion to their rates,
    as MLP-Offload does.

    Gradients stay in host memory. The CPU updates one subgroup after another at the step, while others are read and
    written. MLP-Offload updates in the opposite order in every second iteration, so that the last subgroups of one are
    the first of the next; here the same subgroups stay in memory in every iteration."""
    reject_value(spec)
    if available_host_bytes(workload, machine) is None:
        raise PolicyError(
            f"{spec.text!r} needs to know how much host memory there is: give it (--host-free-bytes 72GB, or "
            "host_memory_bytes in a machine file)"
        )
    builder = PlanBuilder(spec.text, workload)
    builder.gradients()
    previous: tuple[int, ...] = ()
    for subgroup in range(len(builder.sizes)):
        previous = (builder.on_cpu(subgroup, "blocking", previous),)
    plan = stored_in(builder.plan(), workload, machine, _LAYOUT)
    if not plan.storage_buffers:
        return plan
    # All within the step: nothing is read in the backward, or written in the next forward.
    ops = tuple(op._replace(point=STEP, due=None) if op.kind in ("read", "write") else op for op in plan.ops)
    return replace(plan, ops=ops, remark=storage_summary(plan, workload)).validate(workload)
