"""All on the CPU, without waiting for copies."""

from __future__ import annotations

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.registry import GRADS, PARAMS, Choice, nothing_after_colon, policy
from ebbtide.interleave.policies.zero_offload import all_on_cpu
from ebbtide.machines.machine import Machine


@policy("pipelined", grads=GRADS, params=PARAMS)
def pipelined(workload: Workload, machine: Machine, choice: Choice) -> Plan:
    """All on the CPU, conversions and copies overlapped with the updates: the fair baseline for interleaving."""
    nothing_after_colon(choice)
    return all_on_cpu(workload, choice)
