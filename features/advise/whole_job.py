"""The plan of all that may move of a job on a machine: weights and activations of
layers, and the optimizer's state."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbtide.errors import MachineError, WorkloadError
from ebbtide.features.advise.job.compute_times import TransformerCompute
from ebbtide.features.advise.job.sources import CONTEXT_BYTES
from ebbtide.features.advise.job.trace_layers import with_trace_layers
from ebbtide.features.advise.job.training_job import TrainingJob
from ebbtide.interleave.model.workload import (
    ActivationForm,
    Layer,
    Workload,
    with_layers,
)
from ebbtide.interleave.replay.inputs import note_other_machine
from ebbtide.interleave.replay.replay import WHOLE_JOB, PolicyResult, replay
from ebbtide.interleave.replay.workload_from_trace import workload_of
from ebbtide.machines.machine import Machine
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text


@dataclass(frozen=True)
class WholeJobPlan:
    """The plan of a job on a machine. Tokens are those of the GPU; `bound_ms` is the
    shortest iteration of any plan."""

    machine: str
    result: PolicyResult
    bound_ms: float
    tokens_per_s: float | None

    def as_json(self) -> dict[str, Any]:
        """Return an object of `whole_job` of `ebbtide plan --json`."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The plan in a line."""
        if not self.result.fits:
            return (
                "does not fit either where weights and activations of layers move, too"
            )
        speed = (
            "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        )
        time = ms_text(self.result.iteration_ms)
        return (
            f"where weights and activations of layers move, too: {time}{speed} "
            f"({self.result.layers_text})"
        )


def plan_whole_job(
    workload: Workload, tokens: float | None, machine: Machine
) -> WholeJobPlan:
    """Return the plan of all that may move of a workload with layers; `tokens`: those
    of an iteration of the GPU."""
    replayed = replay(workload, machine, [WHOLE_JOB])
    (result,) = replayed.results
    speed = None if tokens is None else tokens / (result.iteration_ms / 1e3)
    return WholeJobPlan(machine.name, result, replayed.bound.iteration_s * 1e3, speed)


def layers_of_job(
    job: TrainingJob, trace: Trace | None, machine: Machine
) -> Workload | None:
    """Return a job's workload with layers, of its trace on its own machine or of its
    shape; None: not known."""
    if trace is None:
        return layered_workload(job, machine)
    recorded = workload_of(trace)
    layered = with_trace_layers(recorded, trace)
    # On another machine other kernels take other times: a dry run for it has them.
    is_own = note_other_machine(recorded, machine, trace) == recorded
    return layered if layered.layers and is_own else None


def layered_workload(job: TrainingJob, machine: Machine) -> Workload:
    """Return the workload of a job of known shape on one GPU, a chunk for each
    micro-step, or raise WorkloadError."""
    if not isinstance(job.compute, TransformerCompute) or job.settings.ranks > 1:
        raise WorkloadError("layers are known of a job of a given size on one rank")
    if machine.gpu_memory_bytes is None:
        raise MachineError(
            f"machine {machine.name} has no gpu_memory_bytes, which a plan for layers "
            "needs"
        )
    shape, micro_steps = job.compute.shape, job.micro_steps
    settings = replace(job.settings, checkpointing=False)
    times = job.compute.times(machine, settings, micro_steps)
    tokens = shape.tokens(settings)
    # Of the forward; products of the vocabulary are in the rest.
    head = 2.0 * tokens * shape.vocabulary * shape.hidden / shape.forward_flops(tokens)
    forward_s, backward_s = (
        length * (1 - head) / shape.layers
        for length in (times.forward_s, times.backward_s)
    )
    params = round(shape.layer_weights)
    forms = (
        ActivationForm("all", micro_steps * shape.layer_bytes(tokens), 0.0),
        ActivationForm(
            "input",
            micro_steps * shape.kept_bytes(tokens, True) / shape.layers,
            forward_s,
        ),
    )
    ends = job.workload.params - shape.layers * params
    used = (
        CONTEXT_BYTES
        + 2 * shape.logit_bytes(tokens)
        + ends * (job.workload.param_bytes + job.workload.grad_bytes)
    )
    workload = replace(
        job.workload,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        gpu_free=((0.0, max(0.0, machine.gpu_memory_bytes - used)),),
        missing_bytes=max(0.0, used - machine.gpu_memory_bytes),
        # All chunks pass a layer one after another, so that its gradient is complete
        # when they have.
        gradients_held_until_step=False,
        sizes=None,
    )
    layers = [
        Layer(f"layer {number}", params, forward_s, backward_s, forms)
        for number in range(shape.layers)
    ]
    return with_layers(workload, layers, micro_steps, workload.name)
