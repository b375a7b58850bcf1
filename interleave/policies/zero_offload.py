"""ZeRO-Offload."""

from __future__ import annotations

from ebbtide.interleave.building import PlanBuilder
from ebbtide.interleave.machine import Machine
from ebbtide.interleave.plan import Plan
from ebbtide.interleave.policies.registry import GRADS, PARAMS_BLOCKING, Choice, nothing_after_colon, policy
from ebbtide.interleave.workload import Workload


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
