"""SuperOffload: updates in the backward, undone where clipping changes them; the tail of the backward on the GPU."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.interleave.model.operations import CLIPPING_FIRST, Departures
from ebbtide.interleave.model.plan import STEP, Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.overlap import Cost, best_count
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES


@policy(
    "superoffload",
    SystemRun("superoffload", 10, ("superoffload,rule=deepspeed",)),
    simulation_only=True,
    uses_storage=False,
    rule=("paper", "deepspeed"),
)
def superoffload(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update on the CPU as soon as gradients come and undo it in place where clipping changes it; keep the subgroups
    whose gradients come last on the GPU, as SuperOffload does.

    Gradients and parameters cross the link in fp32 and are converted on the GPU. How many subgroups are resident is
    what gives the shortest iteration. With `rule=deepspeed` it does what DeepSpeed 0.19 does: with clipping nothing is
    updated before the backward ends, and subgroups are updated and uploaded one after another at the step.
    """
    reject_value(spec)
    is_paper = spec.options["rule"] == "paper"
    most = _fitting_count(workload)

    def cost(count: int) -> Cost:
        return simulate_steps(_plan(workload, spec.text, count, is_paper), workload, machine).cost(machine)

    return _plan(workload, spec.text, best_count(most, cost), is_paper).validate(workload)


def _plan(workload: Workload, text: str, count: int, is_paper: bool) -> Plan:
    """Return the plan with so many resident subgroups, the first ones."""
    builder = PlanBuilder(text, workload, early=True, speculative=is_paper)
    resident = range(count)
    builder.gradients(frozenset(resident), MASTER_BYTES)
    previous: tuple[int, ...] = ()
    for subgroup in reversed(range(count, len(builder.sizes))):
        update = builder.update_on_cpu(subgroup, previous if builder.clip and not is_paper else ())
        if is_paper:
            builder.upload_masters(subgroup, (update,), builder.ops[update].point)
        else:
            previous = (builder.upload_masters(subgroup, (update, *previous), STEP),)
    for subgroup in resident:
        builder.resident(subgroup)
    plan = builder.plan(validate=False)
    if not plan.speculated:
        return plan
    consequence = (
        "an update that clipping changes is undone by arithmetic, which does not give back every bit of the old state"
    )
    return replace(plan, departures=Departures(frozenset({CLIPPING_FIRST}), consequence), rolls_back=True)


def _fitting_count(workload: Workload) -> int:
    """Return how many of the first subgroups fit into memory that is always free with their gradients."""
    free, count = workload.min_free_bytes or 0.0, 0
    for size in workload.subgroups:
        free -= (workload.state_bytes + workload.grad_bytes) * size
        if free < 0:
            break
        count += 1
    return count
