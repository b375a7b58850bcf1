"""The policy: `pipelined`, and a checksum of each gradient as soon as it is in host
memory."""

from dataclasses import replace

from ebbtide.interleave.model.operations import Op
from ebbtide.interleave.policies import Policy, policy


@policy("checked")
def checked(workload, machine, chosen):
    """Update all subgroups on the CPU, as `pipelined` does, and compute the checksum of
    each gradient meanwhile."""
    plan = Policy.parse("pipelined").plan(workload, machine)
    checksums = [
        Op(
            "checksum",
            "checker",
            op.subgroup,
            op.params,
            op.nbytes,
            op.start,
            after=(index,),
        )
        for index, op in enumerate(plan.ops)
        if op.kind == "gradient down"
    ]
    return replace(plan, policy=chosen.text, ops=(*plan.ops, *checksums)).validate(
        workload
    )
