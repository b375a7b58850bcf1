"""Twin-Flow, of ZeRO-Offload++."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import GRADS, PARAMS_BLOCKING, Choice, policy
from ebbtide.machines.machine import Machine


@policy("twin-flow", grads=GRADS, params=PARAMS_BLOCKING)
def twin_flow(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """A static split: the share R after the colon is updated on the CPU, the rest is resident on the GPU for good."""
    ratio = choice.number("the share on the CPU", None, 0.0, 1.0)
    builder = PlanBuilder(choice.text, workload, choice.knobs["grads"] == "blocking")
    on_gpu = resident_count(len(builder.sizes), ratio)
    builder.gradients(keep=frozenset(range(on_gpu)))
    blocking = choice.knobs["params"] == "blocking"
    for subgroup in range(on_gpu):
        builder.resident(subgroup)
    before: tuple[int, ...] = ()
    for subgroup in range(on_gpu, len(builder.sizes)):
        upload = builder.on_cpu(subgroup, blocking, before)
        before = (upload,) if blocking else ()
    return builder.plan()


def resident_count(subgroups: int, ratio: float) -> int:
    """How many of the subgroups, the first ones, stay on the GPU: whole ones, rounded down, as DeepSpeed does it."""
    return int((1 - ratio) * subgroups + 1e-9)
