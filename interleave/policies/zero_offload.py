"""ZeRO-Offload: all updates on the CPU, as DeepSpeed runs them."""

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import GRADS, PARAMS_BLOCKING, DefaultRun, PolicySpec, policy, reject_value
from ebbtide.machines.machine import Machine


@policy("zero-offload", DefaultRun("zero-offload", position=10), in_deepspeed=True, grads=GRADS, params=PARAMS_BLOCKING)
def zero_offload(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update every subgroup on the CPU as DeepSpeed does: one by one, conversion and copy inside the loop."""
    reject_value(spec)
    return all_on_cpu(workload, spec)


def all_on_cpu(workload: Workload, spec: PolicySpec) -> Plan:
    """Make the plan that updates all subgroups on the CPU, with the options `grads` and `params` of the spec."""
    builder = PlanBuilder(spec.text, workload, spec.options["grads"] == "blocking")
    builder.gradients()
    params = spec.options["params"]
    previous_upload: tuple[int, ...] = ()
    for subgroup in range(len(builder.sizes)):
        upload = builder.on_cpu(subgroup, params, previous_upload)
        previous_upload = (upload,) if params == "blocking" else ()
    return builder.plan()
