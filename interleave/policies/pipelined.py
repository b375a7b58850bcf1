"""All updates on the CPU, overlapped with conversions and copies."""

from ebbtide.interleave.model.plan import Plan
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies.overlap import OVERLAP, with_overlap
from ebbtide.interleave.policies.registry import GRADS, PARAMS, DefaultRun, PolicySpec, policy, reject_value
from ebbtide.interleave.policies.zero_offload import all_on_cpu
from ebbtide.machines.machine import Machine


@policy("pipelined", DefaultRun("pipelined", position=30), grads=GRADS, params=PARAMS, overlap=OVERLAP)
def pipelined(workload: Workload, machine: Machine, spec: PolicySpec) -> Plan:
    """Update all subgroups on the CPU, conversions and copies overlapped: the fair baseline for interleaving."""
    reject_value(spec)
    return with_overlap(all_on_cpu(workload, spec), workload, machine, spec.options["overlap"])
