"""The remedy of offload for a job that ran out of memory, with the iteration time of a replayed plan."""

from dataclasses import replace

from ebbtide.analysis.metrics.out_of_memory import OFFLOAD, OutOfMemory, make_remedy
from ebbtide.errors import MachineError, PolicyError, WorkloadError
from ebbtide.interleave.advise.job.inputs import is_same_capacity
from ebbtide.interleave.advise.job.workload_from_trace import workload_of
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.machines.catalog import preset, presets
from ebbtide.machines.machine import Machine, machine_from
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text

_POLICY = "pipelined"


def with_replayed_offload(trace: Trace, error: OutOfMemory) -> OutOfMemory:
    """Return an error whose remedy of offloaded state is that of a replayed plan, with its iteration time.

    The plan is that of the policy `pipelined`, which updates on the CPU, on the recorded machine or on the preset with
    as much device memory. What it uses on the device is subtracted. The remedy stays as it is where the trace cannot be
    replayed, for example since no iteration was finished.
    """
    bound = next((remedy for remedy in error.remedies if remedy.name == OFFLOAD), None)
    machine = _machine(trace, error.record.capacity_bytes)
    if bound is None or machine is None:
        return error
    if machine.unified_memory:
        return replace(error, remedies=[remedy for remedy in error.remedies if remedy is not bound])
    try:
        workload = workload_of(trace)
        schedule = simulate(make_plan(_POLICY, workload, machine), workload, machine)
    except (MachineError, PolicyError, WorkloadError):
        return error
    kept = round(schedule.peak_device_bytes)
    reason = (
        f"all optimizer state on the device, minus {bytes_text(kept)} that the policy {_POLICY} uses there; replayed "
        f"on {machine.name}, an iteration takes {ms_text(schedule.iteration_s * 1e3)}"
    )
    remedy = make_remedy(OFFLOAD, max(bound.bytes - kept, 0), error.record, reason)
    remedies = [remedy if other is bound else other for other in error.remedies]
    return replace(error, remedies=sorted(remedies, key=lambda other: -other.bytes))


def _machine(trace: Trace, capacity: int | None) -> Machine | None:
    if trace.meta.machine is not None:
        return machine_from(trace.meta.machine, f"the machine of {trace.path}")
    if not capacity:
        return None
    machines = [preset(name) for name in presets()]
    same = [m for m in machines if m.gpu_memory_bytes and is_same_capacity(capacity, m.gpu_memory_bytes)]
    return min(same, key=lambda m: abs(capacity - (m.gpu_memory_bytes or 0)), default=None)
