"""Features of DeepSpeed: SuperOffload, ZenFlow, and DeepCompile's offload of optimizer
state."""

from dataclasses import replace

from ebbtide.features.overlap.policy import Cost, best_count
from ebbtide.interleave.model.operations import (
    CLIPPING_FIRST,
    ONE_UPDATE,
    OWN_GRADIENT,
    Departures,
    Rule,
)
from ebbtide.interleave.model.plan import FORWARD, OTHER, UPDATE, Plan, point_at
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Policy, SystemRun, policy, system
from ebbtide.interleave.policies.search.assignment import subgroups_that_fit
from ebbtide.interleave.policies.static_splits import split_plan, with_gradient_buffers
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# DeepSpeed's default of cpuadam_cores_perc.
_CORES_SHARE = 0.8


@system(
    "superoffload",
    SystemRun("superoffload", 10, ("superoffload,rule=deepspeed",)),
    rule=("paper", "deepspeed"),
)
def superoffload(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update on the CPU as soon as gradients come and undo it in place where clipping
    changes it; keep the subgroups whose gradients come last on the GPU, as SuperOffload
    does.

    Gradients and parameters cross the link in fp32 and are converted on the GPU. How
    many subgroups are resident is what gives the shortest iteration. With
    `rule=deepspeed` it does what DeepSpeed 0.19.8 does
    (runtime/superoffload/superoffload_stage3.py): updates run in the backward only
    without clipping, on 0.8 of the cores; at the step each subgroup is converted on the
    CPU and copied from pageable memory, one after another."""
    policy.reject_value()
    make = _paper_plan if policy.options["rule"] == "paper" else _deepspeed_plan
    # Those that fit into memory that is always free, with their gradients.
    per_param = workload.state_bytes + (
        workload.grad_bytes if make is _paper_plan else MASTER_BYTES
    )
    most = subgroups_that_fit(
        workload.subgroups, per_param, workload.min_free_bytes or 0.0
    )

    def cost(count: int) -> Cost:
        return simulate_steps(
            make(workload, policy.text, count), workload, machine
        ).cost(machine)

    return make(workload, policy.text, best_count(most, cost)).validate(workload)


def _deepspeed_plan(workload: Workload, text: str, count: int) -> Plan:
    """Return the plan of DeepSpeed's code with the first `count` subgroups resident.

    A gradient is copied to its place on the host, back for the norm, and to the host
    again in fp32."""
    builder = PlanBuilder(text, workload, early=True)
    resident = frozenset(range(count))
    builder.gradients(resident, workload.grad_bytes + MASTER_BYTES)
    for index in builder.copied_gradients():
        op = builder.ops[index]
        builder.add(
            "gradient up", "h2d", op.subgroup, workload.grad_bytes, (index,), op.start
        )
    for subgroup in sorted(resident):
        builder.resident(subgroup)
    uploaded: tuple[int, ...] = ()
    for subgroup in range(count, len(builder.sizes)):
        # Without clipping updates follow their gradients, and only the copies of
        # parameters follow each other.
        update = builder.update_on_cpu(subgroup, uploaded if builder.clip else ())
        cast = builder.add("cast", "cpu", subgroup, after=(update, *uploaded))
        uploaded = (
            builder.add(
                "upload", "h2d", subgroup, workload.param_bytes, (cast,), pageable=True
            ),
        )
    plan = replace(builder.plan(validate=False), cpu_share=_CORES_SHARE)
    return with_gradient_buffers(plan, workload, offloads=True)


def _paper_plan(workload: Workload, text: str, count: int) -> Plan:
    """Return the plan of the paper with the first `count` subgroups resident."""
    builder = PlanBuilder(text, workload, early=True, speculative=True)
    resident = range(count)
    builder.gradients(frozenset(resident), MASTER_BYTES)
    for subgroup in reversed(range(count, len(builder.sizes))):
        update = builder.update_on_cpu(subgroup)
        builder.upload_masters(subgroup, (update,), builder.ops[update].start)
    for subgroup in resident:
        builder.resident(subgroup)
    plan = builder.plan(validate=False)
    if not plan.speculated:
        return plan
    consequence = (
        "an update that clipping changes is undone by arithmetic, which does not give "
        "back every bit of the old state"
    )
    return replace(
        plan,
        departures=Departures(frozenset({CLIPPING_FIRST}), consequence),
        rolls_back=True,
    )


# DeepSpeed's default of pt_reserved_cores_perc leaves so large a share of the cores to
# the updates.
_RESERVED_SHARE = 0.5


@system(
    "zenflow",
    SystemRun("zenflow:0.1", 20, ("zenflow:0.1,rule=deepspeed",)),
    interval=("4", "1", "2", "8", "16"),
    rule=("paper", "deepspeed"),
)
def zenflow(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update the share S of each subgroup on the GPU in each step, the rest on the CPU
    every `interval` steps, from older gradients, as ZenFlow does.

    The gradients of the rest are copied to the host in each step. The CPU has an
    interval for an update, with half of its cores; an iteration of the plan has
    1/interval of the work. With `rule=deepspeed` it does what DeepSpeed 0.19 does: the
    CPU updates all parameters, gradients are accumulated on the GPU and copied there
    and back for it, and fp32 masters are uploaded at the step."""
    share = policy.number("the share of important gradients", None, 0.0, 1.0)
    interval = int(policy.options["interval"])
    if share == 1:
        return split_plan(workload, policy, range(len(workload.subgroups)))
    builder = PlanBuilder(policy.text, workload)
    is_paper = policy.options["rule"] == "paper"
    on_cpu = 1 - share if is_paper else 1.0
    builder.gradients(bytes_per_param=on_cpu * workload.grad_bytes)
    if not is_paper:
        for index in builder.copied_gradients():
            op = builder.ops[index]
            accumulated = (1 - 1 / interval) * workload.grad_bytes
            builder.add(
                "gradient up", "h2d", op.subgroup, accumulated, (index,), op.start
            )
    for subgroup in range(len(builder.sizes)):
        update = builder.add(
            "update", "cpu", subgroup, start=OTHER, share=on_cpu / interval
        )
        if is_paper:
            builder.add(
                "upload",
                "h2d",
                subgroup,
                workload.param_bytes,
                (update,),
                OTHER,
                share=on_cpu / interval,
            )
        else:
            builder.add("upload", "h2d", subgroup, MASTER_BYTES / interval, (update,))
        if share:
            builder.add("update", "gpu", subgroup, after=builder.clip, share=share)
    rules: set[Rule] = (
        {OWN_GRADIENT, CLIPPING_FIRST, ONE_UPDATE}
        if share
        else {OWN_GRADIENT, CLIPPING_FIRST}
    )
    consequence = (
        f"{100 * (1 - share):.3g} % of each gradient are not applied in their step but "
        f"{interval} steps at a time, "
        "up to two intervals late"
    )
    return replace(
        builder.plan(validate=False),
        departures=Departures(frozenset(rules), consequence),
        cpu_share=_RESERVED_SHARE,
        resident_bytes=share
        * (workload.state_bytes + workload.grad_bytes)
        * workload.params,
    ).validate(workload)


# The share of the device that its memory budget leaves free.
_MARGIN = 0.2


@policy("deepcompile", SystemRun("deepcompile", 40), without=("storage",))
def deepcompile(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update all on the GPU; flush what does not fit when the forward begins, and fetch
    it in the backward, as DeepCompile does with `offload_opt_states`.

    All state is on the device at the step. As many subgroups as the forward has memory
    for stay there, the last ones. A subgroup is fetched at the first moment of the
    backward from which on there is memory for all on the device so far; what finds none
    is fetched when the backward ends. A fifth of the device counts as not free."""
    policy.reject_value()
    margin = _MARGIN * (machine.gpu_memory_bytes or 0.0)
    backward_s = workload.compute_s - workload.backward_s
    before_step = [
        (at_s, free)
        for at_s, free in policy.free_memory_steps(workload)
        if at_s < workload.compute_s
    ]
    floor = (
        min(
            [free for at_s, free in before_step if at_s < backward_s or not at_s],
            default=0.0,
        )
        - margin
    )
    builder = PlanBuilder(policy.text, workload)
    leaving = range(
        len(builder.sizes)
        - subgroups_that_fit(builder.sizes[::-1], workload.state_bytes, floor)
    )
    builder.leave(leaving, FORWARD)
    builder.gradients(keep=frozenset(range(len(builder.sizes))))
    held_bytes = workload.state_bytes * sum(builder.sizes[len(leaving) :])
    for subgroup in leaving:
        held_bytes += workload.state_bytes * builder.sizes[subgroup]
        builder.fetch(
            subgroup, start=_fetch_point(workload, backward_s, held_bytes + margin)
        )
    for subgroup in range(len(builder.sizes)):
        if subgroup in leaving:
            builder.update_fetched(subgroup)
        else:
            builder.resident(subgroup)
    return builder.plan()


def _fetch_point(workload: Workload, backward_s: float, needed_bytes: float) -> float:
    """Return the first point of the backward from which on `needed_bytes` are free.

    Return UPDATE if there is none.
    """
    steps = [
        (at_s, free)
        for at_s, free in workload.gpu_free_from(backward_s)
        if at_s < workload.compute_s
    ]
    begin_s = workload.compute_s
    for at_s, free in reversed(steps):
        if free < needed_bytes:
            break
        begin_s = at_s
    return max(FORWARD, min(point_at(workload, begin_s), UPDATE))
