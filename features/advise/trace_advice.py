"""Advice for the job of a trace on its own machine."""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ebbtide.analysis.metrics.advice import Setting
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.out_of_memory import OFFLOAD, OutOfMemory, make_remedy
from ebbtide.errors import MachineError, PolicyError, WorkloadError
from ebbtide.features.advise.choice import (
    all_on_device,
    best_static_split,
    fits_memory,
    present_of,
)
from ebbtide.features.advise.job.trace_layers import with_trace_layers
from ebbtide.features.advise.lines.setups import PasteContext, setup_of
from ebbtide.features.advise.present import Present
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.policies import Policy
from ebbtide.interleave.replay import inputs
from ebbtide.interleave.replay.recorded_job import own_job, recorded_job
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.interleave.simulation.simulator import simulate, simulate_steps
from ebbtide.machines.machine import unified_memory_text
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, ms_text


class _Job(NamedTuple):
    """The workload of a trace, and its job on its machine."""

    workload: Workload
    context: PasteContext


class TraceAdviser:
    """Recommends settings for the job of a trace, as `ebbtide replay --recommend` does.
    It simulates when asked."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def can_simulate(self) -> bool:
        """Whether the job can be simulated: its parameters, phases and machine are
        known."""
        return self._job is not None

    def split_setting(self) -> Setting | None:
        """Return the best setting of DeepSpeed itself: no offload, or the fastest split
        that fits; None where neither is worth a change, or is known."""
        if self._job is None:
            return None
        workload, context = self._job
        machine = context.machine
        on_gpu = all_on_device(workload, machine)
        steps = on_gpu or best_static_split(workload, machine)
        # With unified memory the state has its place already.
        if steps is None or not (machine.unified_memory or fits_memory(steps, machine)):
            return None
        offload = setup_of(steps, context).deepspeed_config["zero_optimization"][
            "offload_optimizer"
        ]
        text = ": ".join(
            filter(None, ("do not offload at all", unified_memory_text(machine)))
        )
        if not on_gpu:
            part = f'"offload_optimizer": {{"ratio": {offload["ratio"]:g}}}'
            text = (
                "keep that part of the optimizer's state on the device (a static "
                f"split: {part})"
            )
        present = present_of(workload, machine, context.job)
        return present.setting(
            "deepspeed",
            {"offload_optimizer": offload},
            text,
            steps,
            ends_offload=on_gpu is not None,
        )

    def activations_setting(self) -> Setting | None:
        """Return the best choice of activations, with its gain over recomputing all;
        None if none fits or is known."""
        if self._job is None:
            return None
        metrics, machine = JobMetrics(self._trace), self._job.context.machine
        workload = own_job(
            with_trace_layers(self._job.workload, self._trace), self._job.context.job
        )
        if not workload.layers or machine.gpu_update_params_per_s is None:
            return None
        policy = Policy.make("pipelined" if metrics.offloaded else "gpu-only")
        again, best = (
            simulate_steps(
                policy.with_options(activations=kind).plan(workload, machine),
                workload,
                machine,
            )
            for kind in ("recompute", "auto")
        )
        layers = best.valid.plan.layers
        if layers is None or not fits_memory(best, machine):
            return None
        counts = layers.counts(len(workload.chunk_shares))[1]
        text = ", ".join(
            f"{kind.replace('-', ' and ')} those of {count} layers"
            for kind, count in counts.items()
            if count
        )
        if copied := layers.host_bytes(workload):
            text += (
                f": {bytes_text(copied)} to the host in the forward, and back in the "
                "backward"
            )
        # The job itself computes again all that it checkpoints; one that does not fits
        # only so.
        return Present(again).setting(
            "activations", counts, f"activations: {text}", best
        )

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
    """Return an error whose remedy of offloaded state is that of `pipelined`, replayed,
    with its iteration time, less what it uses on the device; as it is where the trace
    cannot be replayed."""
    bound = next((remedy for remedy in error.remedies if remedy.name == OFFLOAD), None)
    machine = inputs.own_machine(trace)
    if bound is None or machine is None:
        return error
    if machine.unified_memory:
        return replace(
            error, remedies=[remedy for remedy in error.remedies if remedy is not bound]
        )
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
