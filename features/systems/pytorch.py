"""Systems on plain PyTorch: FSDP2's CPUOffloadPolicy, and prime-rl and torchao's
optimizer, which do not clip gradients."""

from dataclasses import replace

from ebbtide.features.systems.torch_updates import THREADS, with_torch_rate
from ebbtide.interleave.model.operations import CLIPPING_FIRST, ONE_UPLOAD, Departures
from ebbtide.interleave.model.plan import Plan, backward_points, forward_points
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import Policy, SystemRun, system
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES, STATE_BYTES


@system("fsdp2-offload", SystemRun("fsdp2-offload", 70), threads=THREADS)
def fsdp2_offload(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep parameters and state on the host and update all on the CPU at the step, as
    FSDP2 does with CPUOffloadPolicy.

    Gradients are copied to the host in fp32 within the backward. Parameters are copied
    to the device twice, in fp32: before the forward and before the backward of each
    subgroup uses them. The forward waits for them. torch's fused AdamW updates, on one
    thread or `threads=all`."""
    policy.reject_value()
    builder = PlanBuilder(policy.text, workload)
    needed, count = forward_points(workload), len(builder.sizes)
    for subgroup, point in reversed(list(enumerate(backward_points(workload)))):
        builder.add("upload", "h2d", subgroup, MASTER_BYTES, start=point)
    builder.gradients(bytes_per_param=MASTER_BYTES)
    for subgroup in range(count):
        update = builder.update_on_cpu(subgroup)
        builder.add(
            "upload", "h2d", subgroup, MASTER_BYTES, (update,), due=needed[subgroup]
        )
    plan = with_torch_rate(builder.plan(validate=False), workload, machine, policy)
    return replace(plan, departures=Departures(frozenset({ONE_UPLOAD}))).validate(
        workload
    )


@system("prime-rl", SystemRun("prime-rl", 50))
def prime_rl(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update each subgroup on the CPU as soon as its gradient is there, and upload it
    within the backward, as prime-rl does with `full_offload`. It does not clip."""
    builder = _builder(workload, policy)
    builder.gradients()
    for subgroup in reversed(range(len(builder.sizes))):
        builder.on_cpu(subgroup)
    return _plan(builder, workload, "prime-rl")


@system("torchao", SystemRun("torchao", 60), backward=("eager", "compiled"))
def torchao(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Update on the CPU in the order in which gradients come, as torchao's
    CPUOffloadOptimizer does. It does not clip.

    One stream copies gradients and parameters, so no parameter is uploaded before the
    last gradient is on the host. The step is called when the backward is launched, not
    when it is done, so that updates overlap it (`backward=eager`). A compiled backward
    returns all gradients at its end: with `backward=compiled` nothing overlaps.
    """
    builder = _builder(workload, policy)
    if policy.options["backward"] == "compiled":
        builder.early = False
        builder.gradients_at_step(frozenset(), workload.grad_bytes)
    else:
        builder.gradients()
    copies = builder.copied_gradients()
    for subgroup in reversed(range(len(builder.sizes))):
        update = builder.update_on_cpu(subgroup)
        builder.add(
            "upload",
            "h2d",
            subgroup,
            workload.param_bytes,
            (update, *copies),
            builder.ops[update].start,
        )
    plan = _plan(builder, workload, "torchao")
    plan = with_torch_rate(plan, workload, machine, policy)
    if workload.state_bytes < STATE_BYTES:
        return plan
    no_masters = (
        "torchao keeps no fp32 masters: parameters in half precision are updated in "
        "half precision"
    )
    consequence = "; ".join(filter(None, (no_masters, plan.departures.consequence)))
    return replace(plan, departures=plan.departures._replace(consequence=consequence))


def _builder(workload: Workload, policy: Policy) -> PlanBuilder:
    """Return a builder of plans that update as soon as gradients are ready, whether or
    not the workload clips."""
    policy.reject_value()
    return PlanBuilder(policy.text, replace(workload, clipping=False), early=True)


def _plan(builder: PlanBuilder, workload: Workload, system: str) -> Plan:
    """Return a builder's plan, which departs from clipping if the workload clips."""
    plan = builder.plan(validate=False)
    if workload.clipping:
        consequence = (
            f"{system} does not clip gradients: steps whose norm is too large, or not "
            "finite, are not changed"
        )
        plan = replace(
            plan, departures=Departures(frozenset({CLIPPING_FIRST}), consequence)
        )
    return plan.validate(workload)
