"""The adaptive policy.

The place where each subgroup's state is kept and updated follows from the machine and
the free memory.
"""

from dataclasses import replace

from ebbtide.interleave.model.operations import overlaps_of
from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import DefaultRun, Policy, policy
from ebbtide.interleave.policies.search.best_plan import find_best_plan
from ebbtide.machines.machine import Machine

_NEEDED = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "host_memory_bytes_per_s",
    "cpu_update_params_per_s",
)


@policy(
    "adaptive",
    DefaultRun("adaptive", position=50),
    without=("overlap",),
    takes=("overlap",),
)
def adaptive(workload: Workload, machine: Machine, policy: Policy) -> Plan:
    """Keep state resident in memory that is always free, park it in windows, stream it
    or update on the CPU, as the rates allow."""
    policy.reject_value()
    policy.free_memory_steps(workload)
    machine.need(_NEEDED, f"policy {policy.text}")
    # Of a job that lacks memory whatever the plan, the plan is the best for what is
    # free at other times.
    workload = replace(workload, missing_bytes=0.0)
    plan = find_best_plan(workload, machine, policy, *overlaps_of(policy.overlap))
    if machine.gpu_update_params_per_s is None:
        without_gpu = (
            f"{machine.name} has no gpu_update_params_per_s, so the GPU updates nothing"
        )
        return replace(plan, remark=f"{plan.remark}; {without_gpu}")
    return plan
