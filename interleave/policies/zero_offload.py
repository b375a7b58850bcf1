"""ZeRO-Offload."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import GRADS, PARAMS_BLOCKING, Choice, nothing_after_colon, policy
from ebbtide.machines.machine import Machine


@policy("zero-offload", grads=GRADS, params=PARAMS_BLOCKING)
def zero_offload(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """Every subgroup is updated on the CPU, as DeepSpeed does it: one after the other, conversion and copy in the
    loop."""
    nothing_after_colon(choice)
    return all_on_cpu(workload, choice)


def all_on_cpu(workload: Workload, choice: Choice) -> Plan:
    """All subgroups on the CPU, with the knobs of the choice."""
    builder = PlanBuilder(choice.text, workload, choice.knobs["grads"] == "blocking")
    builder.gradients()
    blocking = choice.knobs["params"] == "blocking"
    before: tuple[int, ...] = ()
    for subgroup in range(len(builder.sizes)):
        upload = builder.on_cpu(subgroup, blocking, before)
        before = (upload,) if blocking else ()
    return builder.plan()
