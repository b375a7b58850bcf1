"""SuperOffload: updates in the backward, undone where clipping changes them; the tail of the backward on the GPU."""

from dataclasses import replace

from ebbtide.interleave.model.operations import CLIPPING_FIRST, Departures
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.overlap import Cost, best_count
from ebbtide.interleave.policies.plan_builder import PlanBuilder
from ebbtide.interleave.policies.registry import PolicySpec, SystemRun, policy, reject_value
from ebbtide.interleave.policies.search.assignment import subgroups_that_fit
from ebbtide.interleave.simulation.simulator import simulate_steps
from ebbtide.machines.machine import Machine
from ebbtide.state_bytes import MASTER_BYTES

# DeepSpeed's default of cpuadam_cores_perc.
_CORES_SHARE = 0.8


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
    what gives the shortest iteration. With `rule=deepspeed` it does what DeepSpeed 0.19.8 does
    (runtime/superoffload/superoffload_stage3.py): updates run in the backward only without clipping, on 0.8 of the
    cores; at the step each subgroup is converted on the CPU and copied from pageable memory, one after another."""
    reject_value(spec)
    make = _paper_plan if spec.options["rule"] == "paper" else _deepspeed_plan
    # Those that fit into memory that is always free, with their gradients.
    per_param = workload.state_bytes + workload.grad_bytes
    most = subgroups_that_fit(workload.subgroups, per_param, workload.min_free_bytes or 0.0)

    def cost(count: int) -> Cost:
        return simulate_steps(make(workload, spec.text, count), workload, machine).cost(machine)

    return make(workload, spec.text, best_count(most, cost)).validate(workload)


def _deepspeed_plan(workload: Workload, text: str, count: int) -> Plan:
    """Return the plan of DeepSpeed's code with so many resident subgroups, the first ones.

    A gradient is copied to its place on the host, back for the norm, and to the host again in fp32."""
    builder = PlanBuilder(text, workload, early=True)
    resident = frozenset(range(count))
    builder.gradients(resident, workload.grad_bytes + MASTER_BYTES)
    for index in builder.copied_gradients():
        op = builder.ops[index]
        builder.add("gradient up", "h2d", op.subgroup, workload.grad_bytes, (index,), op.point)
    for subgroup in sorted(resident):
        builder.resident(subgroup)
    uploaded: tuple[int, ...] = ()
    for subgroup in range(count, len(builder.sizes)):
        # Without clipping updates follow their gradients, and only the copies of parameters follow each other.
        update = builder.update_on_cpu(subgroup, uploaded if builder.clip else ())
        cast = builder.add("cast", "cpu", subgroup, after=(update, *uploaded))
        uploaded = (builder.add("upload", "h2d", subgroup, workload.param_bytes, (cast,), pageable=True),)
    return replace(builder.plan(validate=False), cpu_share=_CORES_SHARE)


def _paper_plan(workload: Workload, text: str, count: int) -> Plan:
    """Return the plan of the paper with so many resident subgroups, the first ones."""
    builder = PlanBuilder(text, workload, early=True, speculative=True)
    resident = range(count)
    builder.gradients(frozenset(resident), MASTER_BYTES)
    for subgroup in reversed(range(count, len(builder.sizes))):
        update = builder.update_on_cpu(subgroup)
        builder.upload_masters(subgroup, (update,), builder.ops[update].point)
    for subgroup in resident:
        builder.resident(subgroup)
    plan = builder.plan(validate=False)
    if not plan.speculated:
        return plan
    consequence = (
        "an update that clipping changes is undone by arithmetic, which does not give back every bit of the old state"
    )
    return replace(plan, departures=Departures(frozenset({CLIPPING_FIRST}), consequence), rolls_back=True)
