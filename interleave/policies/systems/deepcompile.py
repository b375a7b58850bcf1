"""DeepCompile's offload of optimizer state: on the host in forward and backward, on the GPU at the step."""

from ebbtide.interleave.model.plan import FORWARD, UPDATE, Plan, point_at
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, free_memory_steps, policy, reject_value
from ebbtide.interleave.policies.search.assignment import subgroups_that_fit
from ebbtide.machines.machine import Machine

# The share of the device that its memory budget leaves free.
_MARGIN = 0.2


@policy("deepcompile", SystemRun("deepcompile", 40), uses_storage=False)
def deepcompile(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update all on the GPU; flush what does not fit when the forward begins, and fetch it in the backward, as
    DeepCompile does with `offload_opt_states`.

    All state is on the device at the step. As many subgroups as the forward has memory for stay there, the last ones. A
    subgroup is fetched at the first moment of the backward from which on there is memory for all on the device so far;
    what finds none is fetched when the backward ends. A fifth of the device counts as not free."""
    reject_value(spec)
    margin = _MARGIN * (machine.gpu_memory_bytes or 0.0)
    backward_s = workload.compute_s - workload.backward_s
    before_step = [(at_s, free) for at_s, free in free_memory_steps(workload, spec) if at_s < workload.compute_s]
    floor = min([free for at_s, free in before_step if at_s < backward_s or not at_s], default=0.0) - margin
    builder = PlanBuilder(spec.text, workload)
    leaving = range(len(builder.sizes) - subgroups_that_fit(builder.sizes[::-1], workload.state_bytes, floor))
    builder.leave(leaving, FORWARD)
    builder.gradients(keep=frozenset(range(len(builder.sizes))))
    held_bytes = workload.state_bytes * sum(builder.sizes[len(leaving) :])
    for subgroup in leaving:
        held_bytes += workload.state_bytes * builder.sizes[subgroup]
        builder.fetch(subgroup, point=_fetch_point(workload, backward_s, held_bytes + margin))
    for subgroup in range(len(builder.sizes)):
        if subgroup in leaving:
            builder.update_fetched(subgroup)
        else:
            builder.resident(subgroup)
    return builder.plan()


def _fetch_point(workload: Workload, backward_s: float, needed_bytes: float) -> float:
    """Return the first point of the backward from which on so many bytes are free, UPDATE if there is none."""
    steps = [(at_s, free) for at_s, free in workload.gpu_free_from(backward_s) if at_s < workload.compute_s]
    begin_s = workload.compute_s
    for at_s, free in reversed(steps):
        if free < needed_bytes:
            break
        begin_s = at_s
    return max(FORWARD, min(point_at(workload, begin_s), UPDATE))
