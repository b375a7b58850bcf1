"""Twin-Flow, the static split of ZeRO-Offload++."""

from ebbtide.analysis.metrics.deepspeed import resident_range
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import GRADS, PARAMS_BLOCKING, DefaultRun, PolicySpec, policy
from ebbtide.machines.machine import Machine


@policy("twin-flow", DefaultRun("twin-flow:0.5", position=20), in_deepspeed=True, grads=GRADS, params=PARAMS_BLOCKING)
def twin_flow(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Split statically: the share R after the colon is updated on the CPU, the rest stays resident on the GPU."""
    ratio = spec.number("the share on the CPU", None, 0.0, 1.0)
    builder = PlanBuilder(spec.text, workload, spec.options["grads"] == "blocking")
    # A recorded DeepSpeed job follows the version that it ran under, other jobs follow a current one.
    resident = resident_range(ratio, len(workload.subgroups), workload.deepspeed_version)
    builder.gradients(keep=frozenset(resident))
    params = spec.options["params"]
    previous_upload: tuple[int, ...] = ()
    # One loop over the subgroups, which launches an update on the GPU when it gets there.
    for subgroup in range(len(builder.sizes)):
        if subgroup in resident:
            builder.resident(subgroup, previous_upload)
            continue
        upload = builder.on_cpu(subgroup, params, previous_upload)
        previous_upload = (upload,) if params == "blocking" else ()
    return builder.plan()
