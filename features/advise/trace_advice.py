"""Advice for the job of a trace on its own machine."""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ebbtide.analysis.metrics.advice import Advice
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.out_of_memory import OFFLOAD, OutOfMemory, make_remedy
from ebbtide.errors import MachineError, PolicyError, WorkloadError
from ebbtide.features.advise.advice import activations_advice, deepspeed_advice
from ebbtide.features.advise.choice import all_on_device, best_static_split, present_of
from ebbtide.features.advise.job.trace_layers import with_trace_layers
from ebbtide.features.advise.lines.setups import PasteContext
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay import inputs
from ebbtide.interleave.replay.recorded_job import own_job, recorded_job
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text


class _Job(NamedTuple):
    """The workload of a trace, and its job on its machine."""

    workload: Workload
    context: PasteContext


class TraceAdviser:
    """Advises the job of a trace, as `replay --recommend` does, when it is asked."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def can_simulate(self) -> bool:
        """Whether parameters, phases and machine of the job are known."""
        return self._job is not None

    def split_advice(self) -> Advice | None:
        """Return the best setting of DeepSpeed itself: no offload, or the fastest split
        that fits; None where neither is worth a change, or is known."""
        if self._job is None:
            return None
        workload, context = self._job
        machine = context.machine
        steps = all_on_device(workload, machine) or best_static_split(workload, machine)
        if steps is None:
            return None
        return deepspeed_advice(
            steps, present_of(workload, machine, context.job), context
        )

    def activations_advice(self) -> Advice | None:
        """Return the best choice of activations, with its gain over recomputing all;
        None if none fits or is known."""
        if self._job is None:
            return None
        recorded, context = self._job
        layered = own_job(with_trace_layers(recorded, self._trace), context.job)
        if not layered.layers or context.machine.gpu_update_params_per_s is None:
            return None
        offloads = bool(JobMetrics(self._trace).offloaded)
        return activations_advice(layered, context, offloads=offloads)

    @cached_property
    def _job(self) -> _Job | None:
        machine = inputs.own_machine(self._trace)
        if machine is None:
            return None
        try:
            context = PasteContext(
                recorded_job(self._trace), inputs.share_box(machine, None, self._trace)
            )
            return _Job(workload_of(self._trace), context)
        except (MachineError, WorkloadError):
            return None


_POLICY = "pipelined"


def with_replayed_offload(trace: Trace, error: OutOfMemory) -> OutOfMemory:
    """Return an error whose remedy of offloaded state has what a replay of `pipelined`
    frees, and its iteration time; as it is where the trace cannot be replayed."""
    bound = next((remedy for remedy in error.remedies if remedy.name == OFFLOAD), None)
    machine = inputs.own_machine(trace)
    if bound is None or machine is None:
        return error
    others = [remedy for remedy in error.remedies if remedy is not bound]
    if machine.unified_memory:
        return replace(error, remedies=others)
    try:
        workload = workload_of(trace)
        schedule = simulate(
            Policy.make(_POLICY).plan(workload, machine), workload, machine
        )
    except (MachineError, PolicyError, WorkloadError):
        return error
    kept = round(schedule.peak_device_bytes)
    reason = (
        f"all optimizer state on the device, minus {bytes_text(kept)} that the policy "
        f"{_POLICY} uses there; replayed "
        f"on {machine.name}, an iteration takes {ms_text(schedule.iteration_s * 1e3)}"
    )
    remedy = make_remedy(OFFLOAD, max(bound.bytes - kept, 0), error.record, reason)
    remedies = [remedy if other is bound else other for other in error.remedies]
    return replace(error, remedies=sorted(remedies, key=lambda other: -other.bytes))
