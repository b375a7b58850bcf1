"""ZenFlow: important gradients update on the GPU in each step, the others on the CPU every few steps."""

from dataclasses import replace

from ebbtide.interleave.model.operations import CLIPPING_FIRST, ONE_UPDATE, OWN_GRADIENT, Departures, Rule
from ebbtide.interleave.model.plan import OTHER, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy
from ebbtide.interleave.policies.static_splits import split_plan
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# DeepSpeed's default of pt_reserved_cores_perc leaves so large a share of the cores to the updates.
_CORES_SHARE = 0.5


@policy(
    "zenflow",
    SystemRun("zenflow:0.1", 20, ("zenflow:0.1,rule=deepspeed",)),
    simulation_only=True,
    uses_storage=False,
    interval=("4", "1", "2", "8", "16"),
    rule=("paper", "deepspeed"),
)
def zenflow(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update the share S of each subgroup on the GPU in each step, the rest on the CPU every `interval` steps, from
    older gradients, as ZenFlow does.

    The gradients of the rest are copied to the host in each step. The CPU has an interval for an update, with half of
    its cores; an iteration of the plan has 1/interval of the work. With `rule=deepspeed` it does what DeepSpeed 0.19
    does: the CPU updates all parameters, gradients are accumulated on the GPU and copied there and back for it, and
    fp32 masters are uploaded at the step."""
    share = spec.number("the share of important gradients", None, 0.0, 1.0)
    interval = int(spec.options["interval"])
    if share == 1:
        return split_plan(workload, spec, range(len(workload.subgroups)))
    builder = PlanBuilder(spec.text, workload)
    is_paper = spec.options["rule"] == "paper"
    on_cpu = 1 - share if is_paper else 1.0
    builder.gradients(bytes_per_param=on_cpu * workload.grad_bytes)
    if not is_paper:
        for index in builder.copied_gradients():
            op = builder.ops[index]
            accumulated = (1 - 1 / interval) * workload.grad_bytes
            builder.add("gradient up", "h2d", op.subgroup, accumulated, (index,), op.point)
    for subgroup in range(len(builder.sizes)):
        update = builder.add("update", "cpu", subgroup, point=OTHER, share=on_cpu / interval)
        if is_paper:
            builder.add("upload", "h2d", subgroup, workload.param_bytes, (update,), OTHER, share=on_cpu / interval)
        else:
            builder.add("upload", "h2d", subgroup, MASTER_BYTES / interval, (update,))
        if share:
            builder.add("update", "gpu", subgroup, after=builder.clip, share=share)
    rules: set[Rule] = {OWN_GRADIENT, CLIPPING_FIRST, ONE_UPDATE} if share else {OWN_GRADIENT, CLIPPING_FIRST}
    consequence = (
        f"{100 * (1 - share):.3g} % of each gradient are not applied in their step but {interval} steps at a time, "
        "up to two intervals late"
    )
    return replace(
        builder.plan(validate=False),
        departures=Departures(frozenset(rules), consequence),
        cpu_share=_CORES_SHARE,
        resident_bytes=share * (workload.state_bytes + workload.grad_bytes) * workload.params,
    ).validate(workload)
