"""The rate of torch's AdamW on the CPU, which other systems run."""

from dataclasses import replace

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import Policy
from ebbtide.machines.machine import Machine
from ebbtide.machines.sheets import SHARES

# The option `threads` of systems that a launcher starts: torchrun and Ray give each
# process one thread where OMP_NUM_THREADS is not set.
THREADS = ("1", "all")


def with_torch_rate(
    plan: Plan, workload: Workload, machine: Machine, policy: Policy
) -> Plan:
    """Return a plan whose updates on the CPU run at the rate of torch's fused AdamW, a
    share of the machine's; on one thread at most at that of a core."""
    share = SHARES["torch_update"].value
    rate = machine.cpu_update_rate(workload.master)
    if rate and policy.options.get("threads") == "1":
        share = min(share, SHARES["torch_core_update_params_per_s"].value / rate)
    return replace(plan, cpu_share=share)
